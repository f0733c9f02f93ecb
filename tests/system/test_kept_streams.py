"""Streams of an orchestrator that has died: they continue for a limited time, and the next orchestrator takes them
over."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from baton.errors import InvalidArgumentError, NotFoundError, StaleTermError
from baton.sampling_params import SamplingParams
from baton.transport.channel import make_channel
from baton.transport.proto_types import history_to_proto
from baton.transport.status_interceptor import translate_rpc_errors
from baton.types import FinishReason, TokenEvent
from baton.v1 import common_pb2, generate_pb2, kv_pb2
from baton.v1.generate_pb2_grpc import GenerationGroupStub
from baton.v1.kv_pb2_grpc import KvReceiverStub
from generate_workers.servicer import GenerationServer
from orchestrator.workers.streams import SharedStreams, StreamPart
from orchestrator.workers.worker_poller import LEAK_S
from tests.support.clusters.clients import HOST
from tests.support.clusters.cluster import BareCluster, cluster
from tests.support.engines.generation import prompt, reference_ids
from tests.support.engines.speculating import SPECULATING, ways
from tests.support.eventually import eventually
from tests.support.models.tiny_tokenizer import text_of
from tests.support.wire.secret import SECRET

if TYPE_CHECKING:
    from baton.v1.generate_pb2_grpc import GenerationGroupAsyncStub
    from baton.v1.kv_pb2_grpc import KvReceiverAsyncStub

pytestmark = pytest.mark.integration

PARAMS = SamplingParams(max_tokens=40, temperature=0.8, seed=11, ignore_eos=True)
LONG = replace(PARAMS, max_tokens=360)
CHOICES = replace(PARAMS, n=3)
LASTING = replace(PARAMS, max_tokens=300)
SOME_CALLS = 16
"""Of attention, for one choice: they bring two tokens at least, whatever drafts, and not the 40 of PARAMS."""
MANY_CALLS = 60
"""They bring five at least, and not the 300 of LASTING."""
IDS = prompt(30)
KEEP_S = 30.0
TIMEOUT_S = 60.0


class Group:
    """A generation group, as orchestrators speak to it."""

    def __init__(self, channel: grpc.aio.Channel, server: GenerationServer) -> None:
        self._stub: GenerationGroupAsyncStub = GenerationGroupStub(channel)
        self._streams = SharedStreams(channel)
        self._receiver: KvReceiverAsyncStub = KvReceiverStub(channel)
        self._server = server

    def open(self, params: SamplingParams, number: int = 1, keep_s: float = KEEP_S, **fields: Any) -> "Reader":
        history = history_to_proto(IDS, (), params)
        fields.setdefault("request_id", "r")
        request = generate_pb2.StreamRequest(history=history, keep_s=keep_s, number=number, **fields)
        return Reader(self._streams.open(request))

    async def close(self) -> None:
        await self._streams.close()

    async def reserve(self, layout_fingerprint: str) -> common_pb2.LeaseRef:
        request = kv_pb2.ReserveRequest(
            request_id="r",
            num_tokens=len(IDS),
            capacity_tokens=len(IDS) + PARAMS.max_tokens,
            ttl_s=30,
            layout_fingerprint=layout_fingerprint,
        )
        return (await self._receiver.Reserve(request)).ref

    async def num_streams(self) -> int:
        return self._server.engine.status().num_streams

    def take_over(
        self,
        params: SamplingParams,
        outputs: Sequence[Sequence[int]],
        number: int = 2,
        prompt_ids: Sequence[int] = IDS,
        name: str = "r",
    ) -> "Reader":
        known = [common_pb2.Output(token_ids=output) for output in outputs]
        history = history_to_proto(prompt_ids, (), params)
        takeover = generate_pb2.Takeover(outputs=known)
        request = generate_pb2.StreamRequest(request_id=name, history=history, number=number, takeover=takeover)
        return Reader(self._streams.open(request))

    async def cancel(self, number: int) -> None:
        await self._stub.Cancel(generate_pb2.CancelRequest(number=number))

    async def kept(self) -> dict[str, int]:
        status = await self._stub.GetStatus(generate_pb2.GenerationStatusRequest())
        return {each.request_id: each.num_slots for each in status.kept}

    async def num_kept(self) -> int:
        return len((await self._stub.GetStatus(generate_pb2.GenerationStatusRequest())).kept)

    async def num_held(self) -> int:
        status = await self._stub.GetStatus(generate_pb2.GenerationStatusRequest())
        return status.num_slots - status.num_free

    async def until_kept(self, num_slots: int) -> None:
        await eventually(self.kept, lambda kept: kept == {"r": num_slots})


class Reader:
    """One stream's events."""

    def __init__(self, call: StreamPart) -> None:
        self._call = call
        self.events: list[TokenEvent] = []

    async def read(self, num_events: int) -> None:
        while len(self.events) < num_events:
            message = await asyncio.wait_for(self._call.read(), TIMEOUT_S)
            assert isinstance(message, TokenEvent)
            self.events.append(message)

    async def drain(self) -> None:
        while isinstance(message := await asyncio.wait_for(self._call.read(), TIMEOUT_S), TokenEvent):
            self.events.append(message)

    def lose(self) -> None:
        """As the death of its reader does."""
        self._call.cancel()

    def output(self, choice: int = 0) -> list[int]:
        tokens = [event.token for event in self.events if event.choice == choice]
        return [token.token_id for token in tokens if token is not None]

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events)


@pytest.fixture(params=ways("off", ci=("streaming", "ngram", "auto host")))
async def running(request: pytest.FixtureRequest) -> AsyncIterator[BareCluster]:
    async with cluster(num_slots=6, generate=SPECULATING[request.param]) as made:
        yield made


@pytest.fixture
async def group(running: BareCluster) -> AsyncIterator[Group]:
    async with make_channel(f"{HOST}:{running.groups[0].port}", secret=SECRET) as channel:
        made = Group(channel, running.groups[0])
        yield made
        await made.close()


async def lost(running: BareCluster, group: Group, params: SamplingParams, num_events: int, **fields: Any) -> Reader:
    """A stream whose reader has gone after so many events, and which is kept: it has not ended, and stands still until
    the gate is opened."""
    num_calls = SOME_CALLS if params.max_tokens <= PARAMS.max_tokens else MANY_CALLS
    running.group_gates[0].shut(num_passes=params.n * num_calls)
    first = group.open(params, **fields)
    await first.read(num_events)
    first.lose()
    kept = {fields.get("request_id", "r"): params.n}
    await eventually(group.kept, lambda now: now == kept)
    return first


async def test_a_lost_stream_runs_on_and_is_taken_over(running: BareCluster, group: Group) -> None:
    first = await lost(running, group, LASTING, 5)
    running.group_gates[0].open()
    known = first.output()
    second = group.take_over(LASTING, [known])
    await second.drain()
    whole = reference_ids(running.decoder, IDS, LASTING)
    assert known + second.output() == whole
    assert [event.index for event in second.events] == list(range(5, 300))
    assert first.text + second.text == text_of(whole)
    assert await group.kept() == {}


async def test_a_lost_call_loses_all_its_streams_and_each_is_taken_over(running: BareCluster, group: Group) -> None:
    asked = [replace(PARAMS, seed=seed, max_tokens=300) for seed in range(3)]
    running.group_gates[0].shut(num_passes=3 * MANY_CALLS)
    lost = [group.open(params, number, request_id=f"r{number}") for number, params in enumerate(asked)]
    for each in lost:
        await each.read(2)
    await group.close()  # the call ends, as by its orchestrator's death
    await eventually(group.num_kept, lambda number: number == 3)
    running.group_gates[0].open()
    for number, (params, first) in enumerate(zip(asked, lost, strict=True)):
        rest = group.take_over(params, [first.output()], 10 + number, name=f"r{number}")
        await rest.drain()
        assert first.output() + rest.output() == reference_ids(running.decoder, IDS, params)


async def test_a_later_orchestrator_takes_streams_from_one_that_still_reads(running: BareCluster) -> None:
    server, layout = running.groups[0], running.decoder.layout.fingerprint
    target = f"{HOST}:{server.port}"
    async with make_channel(target, secret=SECRET, term=3) as old, make_channel(target, secret=SECRET, term=4) as new:
        earlier, later = Group(old, server), Group(new, server)
        running.group_gates[0].shut(num_passes=MANY_CALLS)
        first = earlier.open(LASTING)
        await first.read(2)
        await later.until_kept(1)
        with pytest.raises(StaleTermError, match="term 3 has ended"):
            await first.read(300)
        running.group_gates[0].open()
        second = later.take_over(LASTING, [first.output()])
        await second.drain()
        assert first.output() + second.output() == reference_ids(running.decoder, IDS, LASTING)
        for call in (earlier.reserve(layout), earlier.kept(), earlier.cancel(2), earlier.open(PARAMS, 9).read(1)):
            with pytest.raises(StaleTermError), translate_rpc_errors():
                await call
        await asyncio.gather(earlier.close(), later.close())


async def test_a_kept_stream_ends_and_waits_for_its_reader_without_a_slot(running: BareCluster, group: Group) -> None:
    first = await lost(running, group, PARAMS, 2)
    running.group_gates[0].open()
    await group.until_kept(0)  # it has run to its end
    assert await group.num_held() == 0
    second = group.take_over(PARAMS, [first.output()[:1]])
    await second.drain()
    assert first.output()[:1] + second.output() == reference_ids(running.decoder, IDS, PARAMS)


async def test_every_choice_goes_on_after_its_own_tokens(running: BareCluster, group: Group) -> None:
    params = replace(LASTING, n=3)
    first = await lost(running, group, params, 9)
    running.group_gates[0].open()
    known = [first.output(0), first.output(1)[:1], []]
    second = group.take_over(params, known)
    await second.drain()
    for choice in range(3):
        whole = reference_ids(running.decoder, IDS, params.of_choice(choice))
        assert known[choice] + second.output(choice) == whole


async def test_a_stream_that_was_read_to_its_end_is_forgotten(running: BareCluster, group: Group) -> None:
    first = await lost(running, group, PARAMS, 1)
    running.group_gates[0].open()
    await group.until_kept(0)
    second = group.take_over(PARAMS, [first.output()])
    await second.drain()
    assert second.events[-1].finish is not None
    whole = [*first.output(), *second.output()]
    assert len(whole) == 40
    with pytest.raises(NotFoundError):
        await group.take_over(PARAMS, [whole], number=3).drain()


async def test_a_reader_that_knows_all_tokens_hears_that_they_are_all(running: BareCluster, group: Group) -> None:
    await lost(running, group, PARAMS, 1)
    running.group_gates[0].open()
    await group.until_kept(0)
    second = group.take_over(PARAMS, [reference_ids(running.decoder, IDS, PARAMS)])
    await second.drain()
    assert [(event.index, event.token, event.finish) for event in second.events] == [(40, None, FinishReason.LENGTH)]


async def test_nobody_came(group: Group) -> None:
    first = group.open(LONG, keep_s=0.2)
    await first.read(3)
    first.lose()
    await eventually(group.num_held, lambda held: held == 0)
    await eventually(group.kept, lambda kept: kept == {})  # one that has ended holds no slot until then
    with pytest.raises(NotFoundError, match="has no stream here"):
        await group.take_over(LONG, [first.output()]).drain()


async def test_a_stream_that_is_not_to_be_kept_ends_with_its_call(group: Group) -> None:
    first = group.open(LONG, keep_s=0)
    await first.read(3)
    first.lose()
    await eventually(group.num_held, lambda held: held == 0)


async def test_a_stream_that_has_no_token_yet_ends_with_its_call(running: BareCluster, group: Group) -> None:
    lease = await group.reserve(running.decoder.layout.fingerprint)
    first = group.open(PARAMS, lease=lease)
    await eventually(group.num_streams, lambda number: number == 1)
    first.lose()
    await eventually(group.num_held, lambda held: held == 0)
    assert await group.kept() == {}


@pytest.mark.parametrize("reading", [True, False])
async def test_cancel_ends_it_at_once(running: BareCluster, group: Group, reading: bool) -> None:
    running.group_gates[0].shut(num_passes=MANY_CALLS)  # it does not end by itself
    first = group.open(LONG, number=4)
    await first.read(3)
    if not reading:
        first.lose()
        await group.until_kept(1)
    await group.cancel(number=3)  # another stream's
    assert await group.num_held() == 1
    await group.cancel(number=4)
    running.group_gates[0].open()
    await eventually(group.num_held, lambda held: held == 0)
    assert await group.kept() == {}


async def test_a_stream_that_is_read_is_not_taken_over(group: Group) -> None:
    first = group.open(LONG)
    await first.read(3)
    with pytest.raises(NotFoundError):
        await group.take_over(LONG, [first.output()]).drain()
    await first.read(6)
    await group.cancel(number=1)


@pytest.mark.parametrize("wrong", ["output", "params", "prompt", "name", "choices"])
async def test_only_the_same_stream_is_taken_over(running: BareCluster, group: Group, wrong: str) -> None:
    first = await lost(running, group, LONG, 3, number=5)
    output = [first.output()[0] + 1] if wrong == "output" else first.output()
    outputs = [output, output] if wrong == "choices" else [output]
    params = replace(LONG, seed=12) if wrong == "params" else LONG
    prompt_ids = IDS[:-1] if wrong == "prompt" else IDS
    with pytest.raises(NotFoundError):
        await group.take_over(params, outputs, 6, prompt_ids, "s" if wrong == "name" else "r").drain()
    assert await group.kept() == {"r": 1}  # its reader may still come
    await group.cancel(number=5)
    running.group_gates[0].open()


async def test_two_clients_may_choose_the_same_request_id(running: BareCluster, group: Group) -> None:
    other, gate = replace(LASTING, seed=99), running.group_gates[0]
    gate.shut()
    first, second = group.open(LASTING, number=1), group.open(other, number=2)
    await eventually(group.num_streams, lambda number: number == 2)
    gate.open()
    gate.shut(num_passes=2 * MANY_CALLS)
    await first.read(2)
    await second.read(2)
    first.lose()
    second.lose()
    await eventually(group.num_kept, lambda number: number == 2)
    gate.open()
    for params, former, number in ((other, second, 3), (LASTING, first, 4)):
        rest = group.take_over(params, [former.output()], number)
        await rest.drain()
        assert former.output() + rest.output() == reference_ids(running.decoder, IDS, params)


@pytest.mark.parametrize("keep_s", [-1.0, float("nan"), 1e9])
async def test_a_bad_time_is_refused(group: Group, keep_s: float) -> None:
    with pytest.raises(InvalidArgumentError, match="keep_s"):
        await group.open(PARAMS, keep_s=keep_s).drain()


async def test_the_next_orchestrator_goes_on_without_a_prefill(running: BareCluster, group: Group) -> None:
    request = running.request(IDS, LASTING)
    first = await lost(running, group, LASTING, 4, request_id=request.request_id)  # as by its orchestrator's death
    running.group_gates[0].open()
    request.outputs.append(common_pb2.Output(token_ids=first.output()[:3]))
    answer = await running.ask(request)
    assert first.output()[:3] + answer.token_ids == reference_ids(running.decoder, IDS, LASTING)
    assert answer.finished is not None
    assert answer.finished.usage.num_attempts == 1
    assert [rank.engine.status().num_jobs_done for rank in running.ranks] == [0, 0]


async def test_a_drained_group_s_stream_is_taken_over(running: BareCluster, group: Group) -> None:
    request = running.request(IDS, LASTING)
    first = await lost(running, group, LASTING, 4, request_id=request.request_id)
    running.members.drain("group-0")  # there is no other: nobody could start it anew
    running.group_gates[0].open()
    request.outputs.append(common_pb2.Output(token_ids=first.output()))
    answer = await running.ask(request)
    assert first.output() + answer.token_ids == reference_ids(running.decoder, IDS, LASTING)
    running.members.undrain("group-0")


async def test_what_is_kept_is_not_leaked(running: BareCluster, group: Group) -> None:
    await lost(running, group, LONG, 3, number=5)  # it holds its slot all the time
    begin_s = time.monotonic()
    while time.monotonic() < begin_s + 2 * LEAK_S:
        assert not any(each.num_leaked for each in (await running.state()).groups)
    assert await group.kept() == {"r": 1}
    await group.cancel(number=5)
    running.group_gates[0].open()


async def test_a_lost_orchestrator_s_request_that_nobody_kept_starts_anew(running: BareCluster) -> None:
    request = running.request(IDS, CHOICES)
    outputs = [reference_ids(running.decoder, IDS, CHOICES.of_choice(choice)) for choice in range(3)]
    for output, num_known in zip(outputs, (5, 0, 40), strict=True):
        request.outputs.append(common_pb2.Output(token_ids=output[:num_known]))
    call, seen = running.open(request), []
    async for message in call:
        if message.HasField("token") and message.token.HasField("token"):
            seen.append((message.token.choice, message.token.index, message.token.token.token_id))
    for choice, (output, num_known) in enumerate(zip(outputs, (5, 0, 40), strict=True)):
        expected = [(choice, index, token_id) for index, token_id in enumerate(output) if index >= num_known]
        assert [each for each in seen if each[0] == choice] == expected
    assert sum(rank.engine.status().num_jobs_done for rank in running.ranks) == 4  # a prefill for each of the two
