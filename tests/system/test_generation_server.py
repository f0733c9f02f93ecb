"""A generation group over real gRPC: pushed and local prompts, hostile input, clients that disconnect, heartbeats."""

import asyncio
import dataclasses
import itertools
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from baton import __version__
from baton.errors import (
    ConfigError,
    InvalidArgumentError,
    LayoutMismatchError,
    ResourceExhaustedError,
    StaleStampError,
    UnavailableError,
)
from baton.modeling.prefix_store.node import DiskPlace
from baton.process.clock import SystemClock
from baton.sampling_params import SamplingParams
from baton.transport.channel import make_channel
from baton.transport.kv_client import KvClient
from baton.transport.kv_sink import ReserveSpec
from baton.transport.proto_types import history_to_proto
from baton.types import FinishReason, RequestId, SampledToken
from baton.v1 import generate_pb2
from generate_workers.config import EngineConfig
from generate_workers.engine.served_model import ServedModel
from generate_workers.servicer import GenerationServer
from tests.support.engines.generation import prompt, reference_ids
from tests.support.engines.generation_servers import SHORT, Client, ids_in, read, serving
from tests.support.engines.prefixes import PLENTY, hung, prefix_folder
from tests.support.engines.slot_tables import page_bytes
from tests.support.eventually import eventually
from tests.support.models.tiny_tokenizer import letter_tokenizer, text_of
from tests.support.wire.secret import PLACE, SECRET

pytestmark = pytest.mark.integration

LONG = SamplingParams(max_tokens=400, ignore_eos=True)
CONFIG = EngineConfig(num_slots=3, max_slot_tokens=500, max_batched_tokens=16, max_waiting=2)


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    async with serving(CONFIG) as made:
        yield made
        await made.until_empty()


async def test_a_local_request_streams_tokens_and_text(client: Client) -> None:
    events = await read(client.open(prompt(40)))
    assert ids_in(events) == reference_ids(client.decoder, prompt(40), SHORT)
    assert "".join(event.text for event in events) == text_of(ids_in(events))
    assert [event.index for event in events] == list(range(8))
    assert events[-1].finish is FinishReason.LENGTH
    assert all(a.unix_ns <= b.unix_ns for a, b in itertools.pairwise(events))


@pytest.mark.parametrize("stream_first", [True, False])
async def test_pushed_kv_gives_the_tokens_of_local_prefill(client: Client, stream_first: bool) -> None:
    lease = await client.reserve(21, 40)
    if not stream_first:
        await client.push_and_commit(lease, prompt(21))
    call = client.open(prompt(21), ref=lease.ref)
    reading = asyncio.create_task(read(call))
    if stream_first:
        await client.push_and_commit(lease, prompt(21))
    assert ids_in(await reading) == reference_ids(client.decoder, prompt(21), SHORT)


async def test_a_resumed_request_continues_the_stream(client: Client) -> None:
    whole = ids_in(await read(client.open(prompt(12))))
    rest = await read(client.open(prompt(12), output_ids=tuple(whole[:3])))
    assert (ids_in(rest), rest[0].index) == (whole[3:], 3)


async def test_scores_that_fit_into_no_message_end_their_own_stream(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("generate_workers.stream_messages._MAX_EVENT_BYTES", 2000)
    other = client.open(prompt(12))
    scored = client.open(prompt(60), dataclasses.replace(SHORT, prompt_logprobs=5))
    with pytest.raises(InvalidArgumentError, match="prompt_logprobs of 60 tokens"):
        await read(scored)
    assert ids_in(await read(other)) == reference_ids(client.decoder, prompt(12), SHORT)
    await eventually(client.num_streams, lambda number: number == 0)


async def test_a_disk_that_never_answers_delays_neither_start_nor_streams_nor_heartbeats(tmp_path: Path) -> None:
    disk = DiskPlace(tmp_path / "disk", PLENTY, answer_s=0.01)
    with prefix_folder() as folder:
        with hung(disk.folder):
            async with serving(CONFIG, prefix_folder=folder, prefix_disk=disk) as client:
                asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
                events = await read(client.open(prompt(40)))
                assert ids_in(events) == reference_ids(client.decoder, prompt(40), SHORT)
                for _ in range(10):
                    assert "does not answer" in (await client.status()).prefix_store.disk_fault
        await eventually(partial(asyncio.to_thread, disk.folder.exists), lambda exists: not exists)


async def test_streams_of_many_clients_do_not_mix(client: Client) -> None:
    answers = await asyncio.gather(*(read(client.open(prompt(10 + 9 * n))) for n in range(3)))
    for n, events in enumerate(answers):
        assert ids_in(events) == reference_ids(client.decoder, prompt(10 + 9 * n), SHORT)


async def test_a_client_that_cancels_frees_its_slot(client: Client) -> None:
    call = client.open(prompt(10), LONG)
    await call.read()
    assert (await client.status()).num_active == 1
    call.cancel()
    await client.until_empty()


async def test_a_client_that_cancels_before_the_commit_frees_its_lease(client: Client) -> None:
    lease = await client.reserve(10, 40)
    call = client.open(prompt(10), ref=lease.ref)
    await eventually(client.num_streams, lambda number: number == 1)
    call.cancel()
    await client.until_empty()
    with pytest.raises(StaleStampError):
        await client.push(lease, prompt(10))


async def test_a_lost_call_frees_the_slots_of_all_its_streams(client: Client) -> None:
    calls = [client.open(prompt(10), LONG) for _ in range(2)]
    for call in calls:
        await call.read()
    await client.streams.close()
    await client.until_empty()


async def test_aborting_a_lease_ends_its_stream(client: Client) -> None:
    lease = await client.reserve(10, 40)
    call = client.open(prompt(10), ref=lease.ref)
    reading = asyncio.create_task(read(call))
    await eventually(client.num_streams, lambda number: number == 1)
    await client.kv.abort(lease.ref)
    (event,) = await reading
    assert (event.finish, event.error.split(":")[0]) == (FinishReason.ERROR, "StaleStampError")


async def test_a_full_group_refuses_leases_and_waiters(client: Client) -> None:
    leases = [await client.reserve(4, 40) for _ in range(3)]
    with pytest.raises(ResourceExhaustedError, match="fewer than 1 of 3 slots"):
        await client.reserve(4, 40)
    waiting = [client.open(prompt(5)) for _ in range(2)]
    await eventually(client.num_streams, lambda number: number == 2)
    with pytest.raises(ResourceExhaustedError, match="2 requests wait"):
        await read(client.open(prompt(5)))
    for lease in leases:
        await client.kv.abort(lease.ref)
    for call in waiting:
        assert len(ids_in(await read(call))) == 8


@pytest.mark.parametrize(
    ("prompt_ids", "params", "text"),
    [
        ((), SHORT, "prompt_ids is empty"),
        ((1, 2, 97), SHORT, "prompt_ids holds 97: .* end at 96"),
        ((2**31,), SHORT, "prompt_ids holds 2147483648"),
        ((1, 2), dataclasses.replace(SHORT, max_tokens=499), "max_tokens = 499 .* at most 500"),
    ],
)
async def test_bad_input_is_refused_by_name_and_limit(
    client: Client, prompt_ids: tuple[int, ...], params: SamplingParams, text: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=text):
        await read(client.open(prompt_ids, params))


async def test_a_bad_sampling_field_is_refused(client: Client) -> None:
    message = generate_pb2.StreamRequest(request_id="r", history=history_to_proto((1,), (), SHORT))
    message.history.sampling.temperature = -1
    with pytest.raises(InvalidArgumentError, match=r"sampling.temperature = -1.0"):
        await read(client.send(message))


async def test_a_request_without_a_name_is_refused(client: Client) -> None:
    message = generate_pb2.StreamRequest(history=history_to_proto((1,), (), SHORT))
    with pytest.raises(InvalidArgumentError, match="request_id is empty"):
        await read(client.send(message))


async def test_a_lease_that_never_was_is_stale(client: Client) -> None:
    lease = await client.reserve(4, 40)
    await client.kv.abort(lease.ref)
    with pytest.raises(StaleStampError):
        await read(client.open(prompt(4), ref=lease.ref))


async def test_kv_of_another_model_is_refused(client: Client) -> None:
    other = dataclasses.replace(client.decoder.layout, model_fingerprint="other")
    async with make_channel(f"127.0.0.1:{client.server.port}", secret=SECRET) as channel:
        with pytest.raises(LayoutMismatchError):
            await KvClient(channel).reserve(ReserveSpec(RequestId("r"), 1, 4, 8, 5.0), other.fingerprint)


async def test_status_says_what_is_held(client: Client) -> None:
    lease = await client.reserve(4, 40)
    assert (await client.status()).num_bytes_held == 0  # promised, not taken
    await client.push(lease, prompt(4))
    status = await client.status()
    assert (status.num_slots, status.num_free, status.num_leased) == (3, 2, 1)
    assert status.num_bytes_held == page_bytes(4, client.decoder.layout)
    assert status.layout_fingerprint == client.decoder.layout.fingerprint
    assert status.version == __version__
    await client.kv.renew(lease.ref, 0.2)
    await client.until_empty()  # nobody renewed it again


async def test_status_steps_grow(client: Client) -> None:
    before = (await client.status()).num_steps
    await read(client.open(prompt(5)))
    status = await client.status()
    assert status.num_steps >= before + 8
    costs = status.step_costs
    assert costs.num_steps > 0 and costs.prefill_s > 0 and costs.verifying == costs.plain
    assert costs.plain.step_s + costs.plain.token_s > 0  # steps of one sequence do not tell one from the other


async def test_a_server_that_stops_ends_running_streams() -> None:
    async with serving(CONFIG) as client:
        reading = asyncio.create_task(read(client.open(prompt(5), LONG)))
        await eventually(client.num_streams, lambda number: number == 1)
        await client.server.stop()
        with pytest.raises(UnavailableError):
            await reading
        with pytest.raises(UnavailableError):
            await client.status()


async def test_an_address_of_another_machine_is_a_config_error(client: Client) -> None:
    model, place = ServedModel(client.decoder, letter_tokenizer()), replace(PLACE, host="192.0.2.1")
    with pytest.raises(ConfigError, match="192.0.2.1:0"):
        await GenerationServer.start(model, place, CONFIG, clock=SystemClock())


async def test_commit_with_the_wrong_first_token_harms_no_other(client: Client) -> None:
    lease = await client.reserve(10, 40)
    good = asyncio.create_task(read(client.open(prompt(30))))
    call = client.open(prompt(10), ref=lease.ref)
    await client.push(lease, prompt(10))
    await client.kv.commit(lease.ref, [SampledToken(1_000_000)])
    (event,) = await read(call)
    assert event.finish is FinishReason.ERROR
    assert ids_in(await good) == reference_ids(client.decoder, prompt(30), SHORT)
