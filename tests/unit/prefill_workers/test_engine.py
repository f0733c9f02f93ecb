"""Engines serve jobs in flight together, settle each exactly once, and outlive every failure."""

import random
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace

import pytest

from baton.errors import (
    ChainError,
    InvalidArgumentError,
    JobAbortedError,
    NotFiniteError,
    RequestCancelledError,
    ResourceExhaustedError,
    StaleStampError,
)
from baton.modeling.forward.decoder import Decoder
from baton.modeling.kv.buffers import KvBuffer
from baton.process.clock import SystemClock
from baton.sampling_params import SamplingParams, StructuredOutput
from baton.text.token_masks import ChoiceMasks
from baton.types import Epoch, JobId, KvLayout, Rank, TokenRange
from prefill_workers.config import PrefillConfig
from prefill_workers.engine import PrefillEngine
from tests.support.engines.chains import (
    WAIT_S,
    ChainGroup,
    Hold,
    KeepingSender,
    Run,
    assert_right,
    poisoned_buffer,
    random_run,
    submit_shuffled,
)
from tests.support.links.link_groups import in_process_connects, torch_connects
from tests.support.models.damaged import DAMAGED, DamagedDecoder
from tests.support.models.tiny_models import random_decoder
from tests.support.models.tiny_tokenizer import ids_of, letter_grammars

pytestmark = pytest.mark.integration


@pytest.fixture
def decoder() -> Decoder:
    return random_decoder(num_layers=4)


# Jobs in flight together.


@pytest.mark.parametrize("num_jobs", [2, 5])
def test_jobs_submitted_in_any_order_on_any_rank_never_mix(decoder: Decoder, num_jobs: int) -> None:
    with ChainGroup(decoder, 3, make_buffer=poisoned_buffer) as group:
        for seed in range(20):
            rng = random.Random(seed)
            runs = [random_run(group, rng, rng.randint(4, 30)) for _ in range(num_jobs)]
            submit_shuffled(group, runs, rng)
            for run in runs:
                assert_right(group, run)


def test_submissions_from_many_threads(decoder: Decoder) -> None:
    with ChainGroup(decoder, 3) as group, ThreadPoolExecutor(8) as pool:
        runs = [random_run(group, random.Random(seed)) for seed in range(30)]
        list(pool.map(group.submit, runs))
        for run in runs:
            assert_right(group, run)


@pytest.mark.parametrize("seed", range(40))
def test_cancels_at_any_time_on_any_rank_touch_no_other_job(decoder: Decoder, seed: int) -> None:
    rng = random.Random(seed)
    num_jobs = rng.choice([2, 5])
    connects = torch_connects if seed % 5 == 0 else in_process_connects
    with ChainGroup(decoder, 3, connects=connects, make_buffer=poisoned_buffer) as group:
        runs = [random_run(group, rng) for _ in range(num_jobs)]
        victims = rng.sample(runs, rng.randint(1, num_jobs))
        for victim in victims:
            cancel_at_some_push(group, victim, rng)
        submit_shuffled(group, runs, rng, victims)
        for run in runs:
            if run in victims:
                assert_resolved(run)
            else:
                assert_right(group, run)
        group.wait_idle()
        assert_right(group, group.submit(random_run(group, rng)))  # links are in step


def cancel_at_some_push(group: ChainGroup, run: Run, rng: random.Random) -> None:
    """Cancels on some rank when some rank pushes some layer."""
    victim = rng.choice(run.job.ranks)
    trigger, layer = rng.choice(run.job.ranks), rng.randrange(group.decoder.config.num_layers)

    def cancel(pushed: int) -> None:
        if pushed == layer:
            group.engines[victim].cancel(run.job.number)

    run.senders[trigger] = KeepingSender(cancel)


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=0.7, seed=2, logprobs=1, n=2)])
def test_prompt_whose_logits_are_not_finite_fails_alone(decoder: Decoder, params: SamplingParams) -> None:
    with ChainGroup(DamagedDecoder(decoder.config, decoder.weights), 2) as group:
        chunks = [TokenRange(0, 12), TokenRange(12, 24)]
        broken = group.prepare([*range(20), DAMAGED, *range(3)], chunks, params=params)
        sound = group.prepare(list(range(24)), chunks)
        submit_shuffled(group, [broken, sound], random.Random(1))
        assert_right(group, sound)
        last = Rank(1)
        error = broken.futures[last].exception(WAIT_S)
        assert isinstance(error, NotFiniteError) and "behind its 24 tokens are not finite" in str(error)
        assert (broken.senders[last].finishes, broken.senders[last].aborts) == ([], [error])


def assert_resolved(run: Run) -> None:
    """Each rank ended once: with its report, cancelled, or told by an earlier rank."""
    for rank, future in run.futures.items():
        error, kv_sender = future.exception(WAIT_S), run.senders[rank]
        assert isinstance(error, RequestCancelledError | JobAbortedError | None)
        assert kv_sender.aborts == ([] if error is None else [error])
        assert len(kv_sender.finishes) == 1 or error is not None


def test_lowest_number_goes_first(decoder: Decoder) -> None:
    order: list[JobId] = []
    hold = Hold()
    with ChainGroup(decoder, 1) as group:
        chunks = [TokenRange(0, 2)]
        blocker = group.submit(group.prepare([1, 2], chunks, on_push=hold))
        hold.wait_begun()
        runs = [group.prepare([1, 2], chunks) for _ in range(3)]
        for run in runs:
            number = run.job.number
            run.senders[Rank(0)] = KeepingSender(lambda layer, number=number: order.append(number))  # type: ignore[misc]
        for run in reversed(runs):
            group.submit(run)
        hold.gate.set()
        for run in [blocker, *runs]:
            run.reports()
    assert order == sorted(order)


def test_a_job_whose_form_is_being_compiled_lets_others_run(decoder: Decoder) -> None:
    masks, form = Future[list[ChoiceMasks]](), StructuredOutput(choice=("b",))
    with ChainGroup(decoder, 2) as group:
        chunks = [TokenRange(0, 2), TokenRange(2, 3)]
        formed = group.prepare([1, 2, 3], chunks, params=SamplingParams(structured_output=form))
        last = Rank(1)
        formed.jobs[last] = replace(formed.jobs[last], masks=masks)
        group.submit(formed)
        formed.futures[Rank(0)].result(WAIT_S)
        assert_right(group, group.submit(group.prepare([4, 5, 6], chunks)))
        assert not formed.futures[last].done()
        with closing(letter_grammars()) as grammars:
            masks.set_result(grammars.prepare(form, ()).result(WAIT_S))
            formed.reports()
    assert [token.token_id for token in formed.senders[last].finishes[0]] == list(ids_of("b"))


def test_a_job_whose_form_is_refused_fails_alone(decoder: Decoder) -> None:
    masks = Future[list[ChoiceMasks]]()
    with ChainGroup(decoder, 1) as group:
        refused = group.prepare([1, 2], [TokenRange(0, 2)])
        refused.jobs[Rank(0)] = replace(refused.jobs[Rank(0)], masks=masks)
        group.submit(refused)
        masks.set_exception(InvalidArgumentError("regex cannot be compiled"))
        with pytest.raises(InvalidArgumentError, match="regex cannot be compiled"):
            refused.futures[Rank(0)].result(WAIT_S)
        assert_right(group, group.submit(group.prepare([1, 2], [TokenRange(0, 2)])))


def test_job_that_waits_lets_others_run(decoder: Decoder) -> None:
    with ChainGroup(decoder, 2) as group:
        waiting = group.prepare([1, 2, 3], [TokenRange(0, 2), TokenRange(2, 3)])
        group.submit(waiting, order=[1])
        alone = group.submit(group.prepare([4, 5], [TokenRange(0, 2)], ranks=[1]))
        assert_right(group, alone)
        assert not waiting.futures[Rank(1)].done()
        group.submit(waiting, order=[0])
        assert_right(group, waiting)


# Cancels and failures of one job.


def test_cancel_ends_a_waiting_job_and_is_told_to_the_ranks_behind(decoder: Decoder) -> None:
    with ChainGroup(decoder, 3) as group:
        run = group.prepare([1, 2, 3], [TokenRange(n, n + 1) for n in range(3)])
        group.submit(run, order=[1, 2])
        group.engines[1].cancel(run.job.number)
        assert isinstance(run.error(1), RequestCancelledError)
        assert run.senders[Rank(1)].aborts == [run.error(1)]
        assert isinstance(run.error(2), JobAbortedError)


def test_cancel_may_carry_its_reason(decoder: Decoder) -> None:
    reason = StaleStampError("the slot was leased again")
    with ChainGroup(decoder, 2) as group:
        run = group.prepare([1, 2, 3], [TokenRange(0, 2), TokenRange(2, 3)])
        group.submit(run, order=[1])
        group.engines[1].cancel(run.job.number, reason)
        group.engines[1].cancel(run.job.number)
        assert run.error(1) is reason


def test_cancel_of_what_is_not_there_is_ignored(decoder: Decoder) -> None:
    with ChainGroup(decoder, 1) as group:
        run = group.submit(group.prepare([1, 2], [TokenRange(0, 2)]))
        run.reports()
        group.engines[0].cancel(run.job.number)
        group.engines[0].cancel(JobId(999))
        assert_right(group, group.submit(group.prepare([1, 2], [TokenRange(0, 2)])))


def test_rank_in_front_of_a_cancelled_one_finishes(decoder: Decoder) -> None:
    with ChainGroup(decoder, 2) as group:
        run = group.prepare([1, 2, 3], [TokenRange(0, 2), TokenRange(2, 3)])
        group.submit(run, order=[1])
        group.engines[1].cancel(run.job.number)
        run.error(1)
        group.submit(run, order=[0])
        assert run.futures[Rank(0)].result(WAIT_S).num_bytes_sent > 0


def test_refused_push_fails_the_job_with_its_error(decoder: Decoder) -> None:
    refusal = StaleStampError("stamp 3 is stale")

    def refuse(rank: Rank, layer: int) -> None:
        if (rank, layer) == (0, 1):
            raise refusal

    with ChainGroup(decoder, 2) as group:
        chunks = [TokenRange(0, 2), TokenRange(2, 3)]
        run = group.submit(group.prepare([1, 2, 3], chunks, on_push=refuse))
        assert run.error(0) is refusal
        assert isinstance(run.error(1), JobAbortedError)
        assert_right(group, group.submit(group.prepare([1, 2, 3], chunks)))


def test_failed_turn_fails_its_job_alone(decoder: Decoder) -> None:
    def fail(rank: Rank, layer: int) -> None:
        raise MemoryError("no more")

    with ChainGroup(decoder, 1) as group:
        run = group.submit(group.prepare([1, 2], [TokenRange(0, 2)], on_push=fail))
        error = run.error(0)
        assert isinstance(error, ChainError)
        assert isinstance(error.__cause__, MemoryError)
        assert_right(group, group.submit(group.prepare([1, 2], [TokenRange(0, 2)])))


def test_sender_that_fails_to_abort_leaves_the_engine_alive(decoder: Decoder) -> None:
    class Stubborn(KeepingSender):
        def abort(self, error: BaseException) -> None:
            raise OSError("cannot")

    with ChainGroup(decoder, 2) as group:
        run = group.prepare([1, 2, 3], [TokenRange(0, 2), TokenRange(2, 3)])
        run.senders[Rank(1)] = Stubborn()
        group.submit(run, order=[1])
        group.engines[1].cancel(run.job.number)
        assert isinstance(run.error(1), RequestCancelledError)
        assert_right(group, group.submit(group.prepare([1, 2], [TokenRange(0, 2)], ranks=[1])))


def test_future_cannot_be_cancelled(decoder: Decoder) -> None:
    with ChainGroup(decoder, 2) as group:
        run = group.prepare([1, 2, 3], [TokenRange(0, 2), TokenRange(2, 3)])
        group.submit(run, order=[1])
        assert not run.futures[Rank(1)].cancel()
        group.submit(run, order=[0])
        assert_right(group, run)


# What is refused at once.


def test_second_job_of_one_number_is_refused(decoder: Decoder) -> None:
    with ChainGroup(decoder, 2) as group:
        run = group.prepare([1, 2, 3], [TokenRange(0, 2), TokenRange(2, 3)])
        group.submit(run, order=[1])
        with pytest.raises(InvalidArgumentError, match="already being served"):
            group.engines[1].submit(run.job, KeepingSender())
        group.submit(run, order=[0])
        assert_right(group, run)


def test_number_is_served_once(decoder: Decoder) -> None:
    with ChainGroup(decoder, 1) as group:
        run = group.submit(group.prepare([1, 2], [TokenRange(0, 2)]))
        run.reports()
        with pytest.raises(JobAbortedError, match="no longer served"):
            group.engines[0].submit(run.job, KeepingSender())


def test_too_many_jobs_are_refused(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefill_workers.engine.MAX_JOBS", 1)
    engine = PrefillEngine(decoder, SystemClock(), PrefillConfig())
    connects = in_process_connects(2)
    try:
        with ThreadPoolExecutor(1) as pool, ChainGroup(decoder, 2) as other:
            met = pool.submit(other.engines[0].start_epoch, Epoch(2), Rank(0), 2, connects[0])
            engine.start_epoch(Epoch(2), Rank(1), 2, connects[1])
            met.result(WAIT_S)
            other.epoch = Epoch(2)
            chunks = [TokenRange(0, 2), TokenRange(2, 3)]
            engine.submit(other.prepare([1, 2, 3], chunks).job, KeepingSender())
            with pytest.raises(ResourceExhaustedError, match="1 jobs are in flight"):
                engine.submit(other.prepare([1, 2, 3], chunks).job, KeepingSender())
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("ids", "ranks", "message"),
    [([1, 97], [0], "token id 97"), ([1] * 600, [0], "at most 512"), ([1, 2], [1], "ranks"), ([1, 2], [7], "ranks")],
)
def test_job_that_cannot_run_here_is_refused(decoder: Decoder, ids: list[int], ranks: list[int], message: str) -> None:
    with ChainGroup(decoder, 2) as group:
        run = group.prepare(ids, [TokenRange(0, len(ids))], ranks=ranks)
        with pytest.raises(InvalidArgumentError, match=message):
            group.engines[0].submit(run.job, KeepingSender())


def test_lack_of_memory_is_told(decoder: Decoder) -> None:
    def fail(layout: KvLayout, tokens: TokenRange) -> KvBuffer:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    with ChainGroup(decoder, 1, make_buffer=fail) as group, pytest.raises(ResourceExhaustedError, match="no memory"):
        group.submit(group.prepare([1, 2], [TokenRange(0, 2)]))
