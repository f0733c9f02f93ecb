"""The probe: numbers of a machine from its steps, exactly where they follow, within bounds where noise has its way."""

import errno
import itertools
import random

import pytest
import torch

from baton.errors import ConfigError
from baton.planning.chips import Chip
from baton.planning.model_shape import ModelShape
from baton_lab.study.roofline import ServedModel, step_time
from deploy.machine.probe import MeasuredRates, Steps, Stopwatch, chip_from, measure, read_rate, with_more_rows
from tests.support.manual_clock import ManualClock

TINY = ModelShape(2, 64, 4, 2, 16, ffn=128, vocab=256)
CHIP = Chip(3e11, 2e10, 1e10)
PARAMS, LAYERS, TOKEN_BYTES = 1e8, 30, 2e4
MODEL = ServedModel(PARAMS, TOKEN_BYTES, 2, LAYERS)


def steps_on(chip: Chip, noise: float = 0.0, seed: int = 0) -> Steps:
    """What the probe would see on a machine that the roofline describes, but for so much noise."""
    rng = random.Random(seed)

    def time_of(batch: int, context: int = 0) -> float:
        return step_time(MODEL, chip, batch=batch, context=context).total_s * rng.gauss(1.0, noise)

    by_rows = with_more_rows({rows: time_of(rows) for rows in (1, 40, 80)}, lambda rows: list(map(time_of, rows)))
    long_bytes = 8 * 1000 * TOKEN_BYTES
    return Steps(by_rows, time_of(8, 1000), time_of(8), long_bytes, LAYERS, PARAMS, 2 * PARAMS)


@pytest.mark.parametrize("overlap", [0.0, 0.3, 1.0])
def test_a_machine_is_found_by_its_steps(overlap: float) -> None:
    made = Chip(3e11, 2e10, 1e10, kv_bandwidth=1e10, overlap=overlap, layer_s=2e-5)
    found = chip_from(steps_on(made), 2e10, 1e10)
    # In a step of one row, what is computed hides too; the probe counts it.
    for batch, context in ((1, 100), (16, 200), (32, 1000), (64, 10)):
        times = [step_time(MODEL, chip, batch=batch, context=context).total_s for chip in (made, found)]
        assert times[1] == pytest.approx(times[0], rel=0.12), (batch, context, found)
    assert found.kv_bandwidth == pytest.approx(1e10)
    assert found.flops == pytest.approx(3e11, rel=0.01)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("overlap", [0.0, 0.5, 1.0])
def test_rows_are_doubled_until_computing_shows(overlap: float, seed: int) -> None:
    """With a critical batch of 150, 80 rows are bound by reading."""
    steps = steps_on(Chip(3e12, 2e10, 1e10, overlap=overlap, layer_s=2e-5), noise=0.005, seed=seed)
    assert steps.is_bound and max(steps.by_rows) > 80
    assert chip_from(steps, 2e10, 1e10).flops == pytest.approx(3e12, rel=0.08)


def test_a_machine_that_only_reads_computes_at_least_so_much() -> None:
    steps = steps_on(Chip(1e15, 2e10, 1e10, overlap=1.0), noise=0.005)
    found = chip_from(steps, 2e10, 1e10)
    assert max(steps.by_rows) == 640 and not steps.is_bound
    assert found.flops == pytest.approx(640 * 2 * PARAMS / steps.by_rows[640]) and found.flops < 1e15
    assert "FLOP/s are at least that" in MeasuredRates(found, 1.0, steps.is_bound).doubt


def test_noise_gives_no_impossible_machine() -> None:
    upside_down = Steps({1: 0.5, 40: 0.3, 80: 0.1}, 0.1, 0.2, 1e6, LAYERS, PARAMS, 2 * PARAMS)
    found = chip_from(upside_down, 2e10, 1e10)
    assert 0 <= found.overlap <= 1 and found.layer_s >= 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_this_machine_is_measured_and_left_as_it_was(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deploy.machine.probe._READ_BYTES", 2**20)
    monkeypatch.setattr("deploy.machine.probe._OUT_OF_CACHE_BYTES", 2**16)
    monkeypatch.setattr("deploy.machine.probe._KV_BYTES", 2**20)
    before = torch.get_num_threads()
    chip = measure(TINY, dtype, 1, 1e9).chip
    assert torch.get_num_threads() == before
    assert chip.memory_bandwidth > 1e6 and chip.flops > 1e6 and chip.memory_bytes == 1e9


def test_a_rate_of_reading_is_in_bytes_a_second() -> None:
    assert 1e6 < read_rate(Stopwatch()) < 1e13


def test_repeats_that_differ_are_said() -> None:
    time = ManualClock(start_s=0.0)
    clock, took = Stopwatch(time.now_s), iter((0.01, 0.02, 0.03, 0.03, 0.03, 0.02, 0.03))
    uncounted = itertools.cycle((True, False))
    steady, uneven = clock.times(
        [lambda: time.advance(0.01), lambda: time.advance(0.05 if next(uncounted) else next(took))]
    )
    assert steady == pytest.approx([0.01] * 7)
    assert uneven == pytest.approx([0.01, 0.02, 0.02, 0.03, 0.03, 0.03, 0.03])
    assert clock.spread == pytest.approx(3)
    assert "this machine is busy" in MeasuredRates(CHIP, clock.spread).doubt
    assert MeasuredRates(CHIP, 1.1).doubt == ""


def test_slow_calls_are_not_repeated_for_long() -> None:
    time = ManualClock()
    assert Stopwatch(time.now_s).times([lambda: time.advance(10.0)]) == [[10.0]]


def test_a_model_that_memory_does_not_hold_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"measuring takes 0.3 GB of memory, 0.1 are free: free some"):
        measure(TINY, "bfloat16", 1, 1e8)


def test_a_folder_that_cannot_be_written_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("deploy.machine.probe.save_file", full)
    with pytest.raises(ConfigError, match="cannot be written .*No space left on device.*: free disk space"):
        measure(TINY, "bfloat16", 1, 1e9)
