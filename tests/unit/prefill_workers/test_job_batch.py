"""Short jobs of one rank are computed together on a device with its own memory, and each as if it were alone."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
from torch import Tensor

from baton.errors import ChainError, NotFiniteError, RequestCancelledError
from baton.modeling.device.emulated import EmulatedDevice
from baton.modeling.forward.decoder import Decoder, Step
from baton.sampling_params import SamplingParams
from baton.types import Rank, TokenRange
from prefill_workers import job_batch
from tests.support.engines.chains import ChainGroup, Hold, Run, assert_right, cached_prefix, run_chain, until
from tests.support.engines.devices import PoisonedDevice
from tests.support.links.link_groups import MakeConnect, communicator_connects, in_process_connects
from tests.support.models.tiny_models import random_decoder

pytestmark = pytest.mark.integration

CPU = random_decoder(num_layers=3)
LENGTHS = (60, 7, 1, 30)


class CountingDecoder(Decoder):
    """Decoder that records the number of tokens of each forward pass."""

    def __init__(self, device: EmulatedDevice | None) -> None:
        super().__init__(CPU.config, CPU.weights, device=device)
        self.lengths: list[int] = []

    def embed(self, token_ids: Sequence[int] | Tensor, step: Step) -> Tensor:
        self.lengths.append(len(token_ids))
        return super().embed(token_ids, step)


@contextmanager
def waiting(group: ChainGroup) -> Iterator[None]:
    """Keep the engine busy with a job of 5 tokens while the block submits others."""
    hold = Hold()
    first = run_chain(group, 99, num_tokens=5, on_push=hold)
    hold.wait_begun()
    yield
    hold.gate.set()
    assert_right(group, first, CPU)


@pytest.mark.parametrize("connects", [in_process_connects, communicator_connects])
def test_short_jobs_that_wait_are_computed_together(connects: MakeConnect) -> None:
    decoder = CountingDecoder(PoisonedDevice())
    with ChainGroup(decoder, 1, connects=connects) as group:
        with waiting(group):
            runs = [run_chain(group, seed, num_tokens=length) for seed, length in enumerate(LENGTHS)]
        for run in runs:
            assert_right(group, run, CPU)
        reports = [report for run in runs for report in run.reports()]
    assert decoder.lengths == [5, sum(LENGTHS)]
    took_s = [(report.end_ns - report.start_ns) / 1e9 for report in reports]
    shares = [1 - report.wait_s / each_s for report, each_s in zip(reports, took_s, strict=True)]
    assert sum(shares) == pytest.approx(1, abs=0.3), "the jobs share the time of their turns"


def test_jobs_with_choices_and_with_a_cached_prefix_are_computed_together() -> None:
    decoder, params = CountingDecoder(PoisonedDevice()), SamplingParams(n=3, temperature=1.0, seed=5)
    with ChainGroup(decoder, 1) as group:
        ids = list(range(40))
        with waiting(group):
            prefix = cached_prefix(CPU, ids, 16)
            runs = [
                group.submit(group.prepare(ids, [TokenRange(16, 40)], prefix=lambda: prefix)),
                group.submit(group.prepare(ids, [TokenRange(0, 40)], params=params)),
                run_chain(group, 3, num_tokens=12),
            ]
        alone = group.submit(group.prepare(ids, [TokenRange(0, 40)], params=params))
        for run in (runs[1], alone):
            run.reports()
        assert runs[1].senders[Rank(0)].finishes == alone.senders[Rank(0)].finishes
        for run in (runs[0], runs[2]):
            assert_right(group, run, CPU)
    assert decoder.lengths == [5, 24 + 40 + 12, 40]


def compute_all(decoder: CountingDecoder) -> None:
    """Submit a job of each length, before the first begins, and check their results."""
    with ChainGroup(decoder, 1) as group:
        with waiting(group):
            runs = [run_chain(group, seed, num_tokens=length) for seed, length in enumerate(LENGTHS)]
        for run in runs:
            assert_right(group, run, CPU)


def test_a_cpu_computes_each_job_alone() -> None:
    decoder = CountingDecoder(None)
    compute_all(decoder)
    assert decoder.lengths == [5, *LENGTHS]


def test_long_jobs_and_jobs_of_several_ranks_are_computed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_batch, "MOST_JOB_TOKENS", 30)
    decoder = CountingDecoder(PoisonedDevice())
    compute_all(decoder)
    assert sorted(decoder.lengths) == [5, 38, 60]
    decoder.lengths.clear()
    with ChainGroup(decoder, 2) as group:
        for run in [run_chain(group, seed, num_tokens=20) for seed in range(3)]:
            assert_right(group, run, CPU)
    assert len(decoder.lengths) == 6


def test_the_tokens_of_a_turn_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_batch, "MOST_BATCH_TOKENS", 68)
    decoder = CountingDecoder(PoisonedDevice())
    compute_all(decoder)
    assert sorted(decoder.lengths) == [5, 30, 68]


def in_batch(group: ChainGroup, hold: Hold, at_layer: int = 0) -> list[Run]:
    """Submit three jobs that are computed together. `hold` holds the engine when it pushes a layer of the second."""

    def on_push(rank: Rank, layer: int) -> None:
        if layer == at_layer:
            hold()

    with waiting(group):
        runs = [run_chain(group, seed, num_tokens=20, on_push=on_push if seed == 1 else None) for seed in range(3)]
    hold.wait_begun()
    return runs


@pytest.mark.parametrize("victim", range(3))
@pytest.mark.parametrize("at_layer", range(3))
def test_a_job_that_is_cancelled_leaves_the_others_unchanged(victim: int, at_layer: int) -> None:
    decoder, hold = CountingDecoder(PoisonedDevice()), Hold()
    with ChainGroup(decoder, 1) as group:
        runs = in_batch(group, hold, at_layer)
        group.engines[0].cancel(runs[victim].job.number)
        hold.gate.set()
        assert isinstance(runs[victim].error(0), RequestCancelledError)
        for run in runs[:victim] + runs[victim + 1 :]:
            assert_right(group, run, CPU)
        until(lambda: decoder.device.memory_use.num_bytes == 0)
    assert decoder.lengths == [5, 60]


def test_a_turn_that_fails_ends_the_jobs_of_the_batch_and_no_other() -> None:
    decoder = CountingDecoder(PoisonedDevice())

    def fail(*_: int) -> None:
        raise RuntimeError("the bus is gone")

    with ChainGroup(decoder, 1) as group:
        with waiting(group):
            runs = [run_chain(group, seed, num_tokens=20, on_push=fail if seed else None) for seed in range(2)]
        for run in runs:
            error = run.error(0)
            assert isinstance(error, ChainError) and "the bus is gone" in str(error)
            assert str(error).startswith(f"job {run.job.number} ")
            assert run.senders[Rank(0)].aborts == [error]
        assert_right(group, run_chain(group, 5), CPU)
        until(lambda: decoder.device.memory_use.num_bytes == 0)


def test_a_job_whose_logits_are_not_finite_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = CountingDecoder(PoisonedDevice())
    logits = decoder.logits

    def poisoned(hidden_RD: Tensor) -> Tensor:
        logits_RV = logits(hidden_RD)
        if len(logits_RV) == 3:
            logits_RV[1] = float("nan")
        return logits_RV

    vars(decoder)["logits"] = poisoned
    with ChainGroup(decoder, 1) as group:
        with waiting(group):
            runs = [run_chain(group, seed, num_tokens=20) for seed in range(3)]
        assert isinstance(runs[1].error(0), NotFiniteError)
        for run in (runs[0], runs[2]):
            assert_right(group, run, CPU)
