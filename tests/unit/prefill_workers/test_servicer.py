"""A prefill group over gRPC: KV goes to a real receiver, errors keep their class, a cancelled call ends its job."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator

import grpc
import pytest

from baton import __version__
from baton.errors import BatonError, EpochEndedError, InvalidArgumentError, LinkBrokenError, UnavailableError
from baton.proto_types import range_from_proto, range_to_proto
from baton.sampling_params import SamplingParams, StructuredOutput
from baton.transport.proto_types import history_to_proto
from baton.transport.status_interceptor import translate_rpc_errors
from baton.types import LeaseRef, Stamp, TokenRange
from baton.v1 import prefill_pb2
from prefill_workers.servicer import job_from_proto
from tests.support.engines.prefill_servers import CHUNKS, HOST, TIMEOUT_S, Ranks, two_ranks
from tests.support.eventually import eventually
from tests.support.models.tiny_tokenizer import EOS_ID, HeldGrammars, letter_tokenizer

pytestmark = pytest.mark.integration


@pytest.fixture
async def ranks() -> AsyncIterator[Ranks]:
    async with two_ranks() as both:
        await both.start_epoch()
        yield both


async def test_kv_arrives_in_the_slot_and_is_committed_with_the_first_token(ranks: Ranks) -> None:
    lease = await ranks.lease()
    job = ranks.job(lease)
    await asyncio.gather(ranks.run(0, job), ranks.run(1, job))
    ranks.check_slot(lease)


async def test_first_token_carries_its_logprobs(ranks: Ranks) -> None:
    lease = await ranks.lease()
    job = ranks.job(lease, params=SamplingParams(logprobs=2))
    await asyncio.gather(ranks.run(0, job), ranks.run(1, job))
    first = ranks.receiver.sink.first(lease.ref)
    assert first is not None
    assert first.logprob is not None
    assert len(first.top) == 2


async def test_report_says_what_was_computed_pushed_and_sent(ranks: Ranks) -> None:
    job = ranks.job(await ranks.lease())
    reports = await asyncio.gather(ranks.run(0, job), ranks.run(1, job))
    token_bytes = ranks.decoder.layout.token_bytes
    assert [report.timing.rank for report in reports] == [0, 1]
    assert [report.timing.num_bytes_pushed for report in reports] == [len(chunk) * token_bytes for chunk in CHUNKS]
    assert [report.timing.num_bytes_sent for report in reports] == [13 * token_bytes, 0]
    assert all(report.timing.num_bytes_shared == report.timing.num_bytes_pushed for report in reports)
    for chunk, timing in zip(CHUNKS, (report.timing for report in reports), strict=True):
        assert range_from_proto(timing.tokens) == chunk
        assert len(timing.layers) == 3
        assert timing.start_ns <= timing.push_start_ns <= timing.push_end_ns


async def test_ranks_that_may_not_share_memory_push_over_grpc() -> None:
    async with two_ranks(may_share=False) as ranks:
        await ranks.start_epoch()
        job = ranks.job(await ranks.lease())
        reports = await asyncio.gather(ranks.run(0, job), ranks.run(1, job))
    assert [report.timing.num_bytes_shared for report in reports] == [0, 0]


async def test_refused_push_ends_the_job_on_all_ranks(ranks: Ranks) -> None:
    lease = await ranks.lease()
    stale = dataclasses.replace(lease, ref=LeaseRef(lease.ref.slot, Stamp(lease.ref.stamp + 7)))
    job = ranks.job(stale)
    errors = await asyncio.gather(ranks.run(0, job), ranks.run(1, job), return_exceptions=True)
    # by its class, unless gRPC lost the receiver's status, as it may when that meets a write
    assert all(isinstance(error, BatonError) for error in errors)
    following = ranks.job(lease)
    await asyncio.gather(ranks.run(0, following), ranks.run(1, following))


async def test_receiver_that_is_not_there_is_unavailable(ranks: Ranks) -> None:
    gone = dataclasses.replace(await ranks.lease(), endpoint=f"{HOST}:1")
    job = ranks.job(gone)
    errors = await asyncio.gather(ranks.run(0, job), ranks.run(1, job), return_exceptions=True)
    assert isinstance(errors[0], UnavailableError)


async def test_cancelled_call_ends_its_job_and_its_push(ranks: Ranks) -> None:
    lease = await ranks.lease()
    job = ranks.job(lease)
    call = ranks.stubs[1].Run(job)
    await eventually(lambda: ranks.status(1), lambda status: status.num_jobs == 1, TIMEOUT_S)
    call.cancel()
    await eventually(lambda: ranks.status(1), lambda status: status.num_jobs == 0, TIMEOUT_S)
    await ranks.receiver.sink.writers_become(lease.ref.slot, 0)


async def test_forms_of_cancelled_calls_are_not_compiled_if_they_wait() -> None:
    grammars = HeldGrammars(letter_tokenizer().to_json, (EOS_ID,))
    forms = [StructuredOutput(choice=(letter,)) for letter in "abc"]
    async with two_ranks(grammars=(None, grammars)) as ranks:
        await ranks.start_epoch()
        first = grammars.prepare(forms[0], ())
        assert await asyncio.to_thread(grammars.is_begun.wait, TIMEOUT_S)
        call = ranks.stubs[1].Run(ranks.job(await ranks.lease(), params=SamplingParams(structured_output=forms[1])))
        await eventually(lambda: ranks.status(1), lambda status: status.num_jobs == 1, TIMEOUT_S)
        call.cancel()
        await eventually(lambda: ranks.status(1), lambda status: status.num_jobs == 0, TIMEOUT_S)
        grammars.may_end.set()
        for each in (first, grammars.prepare(forms[2], ())):
            await asyncio.wrap_future(each)
    assert grammars.begun == [forms[0], forms[2]]


async def test_job_of_an_ended_epoch_is_refused(ranks: Ranks) -> None:
    job = ranks.job(await ranks.lease())
    await ranks.start_epoch()
    with pytest.raises(EpochEndedError):
        await ranks.run(0, job)


async def test_next_epoch_ends_a_running_job(ranks: Ranks) -> None:
    job = ranks.job(await ranks.lease())
    running = asyncio.create_task(ranks.run(1, job))
    await eventually(lambda: ranks.status(1), lambda status: status.num_jobs == 1, TIMEOUT_S)
    await ranks.start_epoch()
    with pytest.raises((EpochEndedError, LinkBrokenError)):
        await running


async def test_epoch_that_not_all_join_fails_and_is_told_by_status(ranks: Ranks) -> None:
    with pytest.raises(LinkBrokenError, match="met not all 2 ranks"):
        await ranks.start_epoch(ranks=[0], timeout_s=0.3)
    status = await ranks.status(0)
    assert status.epoch == 2
    assert "met not all 2 ranks" in status.epoch_error
    await ranks.start_epoch()
    assert (await ranks.status(0)).epoch_error == ""


async def test_status_tells_epoch_layout_and_version(ranks: Ranks) -> None:
    status = await ranks.status(0)
    assert (status.epoch, status.epoch_error, status.num_jobs) == (1, "", 0)
    assert status.layout_fingerprint == ranks.decoder.layout.fingerprint
    assert status.version == __version__


@pytest.mark.parametrize(
    ("field_name", "value", "message"),
    [
        ("epoch", 2**48, f"epoch = {2**48} is out of range"),
        ("rank", 2, "rank = 2"),
        ("timeout_s", 0.0, "timeout_s"),
        ("store", "here", "store = 'here'"),
    ],
)
async def test_epoch_request_that_makes_no_sense(ranks: Ranks, field_name: str, value: object, message: str) -> None:
    request = prefill_pb2.StartEpochRequest(epoch=9, rank=0, num_ranks=2, store=f"{HOST}:1", timeout_s=1.0)
    setattr(request, field_name, value)
    with pytest.raises(InvalidArgumentError, match=message), translate_rpc_errors():
        await ranks.stubs[0].StartEpoch(request)


async def test_lease_must_be_for_the_whole_prompt(ranks: Ranks) -> None:
    short = dataclasses.replace(await ranks.lease(), num_tokens=29)
    with pytest.raises(InvalidArgumentError, match=r"lease\.num_tokens = 29"):
        await ranks.run(0, ranks.job(short))


async def test_many_calls_at_once(ranks: Ranks) -> None:
    lease = await ranks.lease()
    jobs = [ranks.job(lease) for _ in range(8)]
    reports = await asyncio.gather(*(ranks.run(rank, job) for job in jobs for rank in (1, 0)))
    assert len(reports) == 16


def test_job_takes_over_every_field() -> None:
    message = prefill_pb2.PrefillJob(
        epoch=4,
        job=9,
        request_id="r",
        attempt=3,
        ranks=[2],
        chunks=[range_to_proto(TokenRange(0, 3))],
        history=history_to_proto((1, 2), (3,), SamplingParams(seed=5)),
        due_s=1.75e9,
        layer_s=0.25,
    )
    job = job_from_proto(message)
    assert (job.epoch, job.number, job.request_id, job.attempt, job.ranks) == (4, 9, "r", 3, (2,))
    assert (job.chunks, job.token_ids, job.params.seed, job.prefix) == ((TokenRange(0, 3),), [1, 2, 3], 5, ())
    assert (job.due_s, job.layer_s) == (1.75e9, 0.25)


async def test_server_stops_with_a_job_in_flight() -> None:
    async with two_ranks() as ranks:
        await ranks.start_epoch()
        call = ranks.stubs[1].Run(ranks.job(await ranks.lease()))
        await eventually(lambda: ranks.status(1), lambda status: status.num_jobs == 1, TIMEOUT_S)
        await ranks.servers[1].stop()
        with pytest.raises(grpc.aio.AioRpcError):
            await call
        await ranks.servers[1].stop()
