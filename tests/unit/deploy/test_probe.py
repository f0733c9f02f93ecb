"""The probe: numbers of a machine from its steps, exactly where they follow, within bounds where noise has its way."""

import errno
import itertools

import pytest
import torch

from baton.clock import ManualClock
from baton.errors import ConfigError
from deploy.probe import Measured, Steps, Stopwatch, chip_from, measure, read_rate
from planning.chips import Chip
from planning.model_shape import ModelShape
from planning.roofline import ServedModel, step_time

TINY = ModelShape(2, 64, 4, 2, 16, ffn=128, vocab=256)
CHIP = Chip(3e11, 2e10, 1e10)
PARAMS, LAYERS, TOKEN_BYTES = 1e8, 30, 2e4
MODEL = ServedModel(PARAMS, TOKEN_BYTES, 2, LAYERS)


def steps_on(chip: Chip, rows: tuple[int, int, int] = (1, 40, 80)) -> Steps:
    """What the probe would see on a machine that the roofline describes."""
    times = {batch: step_time(MODEL, chip, batch=batch, context=0).total_s for batch in (*rows, 8)}
    long_s = step_time(MODEL, chip, batch=8, context=1000).total_s
    return Steps(
        {batch: times[batch] for batch in rows}, long_s, times[8], 8 * 1000 * TOKEN_BYTES, LAYERS, PARAMS, 2 * PARAMS
    )


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


def test_noise_gives_no_impossible_machine() -> None:
    upside_down = Steps({1: 0.5, 40: 0.3, 80: 0.1}, 0.1, 0.2, 1e6, LAYERS, PARAMS, 2 * PARAMS)
    found = chip_from(upside_down, 2e10, 1e10)
    assert 0 <= found.overlap <= 1 and found.layer_s >= 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_this_machine_is_measured_and_left_as_it_was(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deploy.probe._READ_BYTES", 2**20)
    monkeypatch.setattr("deploy.probe._OUT_OF_CACHE_BYTES", 2**16)
    monkeypatch.setattr("deploy.probe._KV_BYTES", 2**20)
    before = torch.get_num_threads()
    chip = measure(TINY, dtype, 1, 1e9).chip
    assert torch.get_num_threads() == before
    assert chip.memory_bandwidth > 1e8 and chip.flops > 1e6 and chip.memory_bytes == 1e9


def test_reading_is_faster_than_a_disk_and_slower_than_a_cache() -> None:
    assert 1e8 < read_rate(Stopwatch()) < 1e13


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
    assert "this machine is busy" in Measured(CHIP, clock.spread).doubt
    assert Measured(CHIP, 1.1).doubt == ""


def test_slow_calls_are_not_repeated_for_long() -> None:
    time = ManualClock()
    assert Stopwatch(time.now_s).times([lambda: time.advance(10.0)]) == [[10.0]]


def test_a_model_that_memory_does_not_hold_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"measuring takes 0.3 GB of memory, 0.1 are free: free some"):
        measure(TINY, "bfloat16", 1, 1e8)


def test_a_folder_that_cannot_be_written_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("deploy.probe.save_file", full)
    with pytest.raises(ConfigError, match="cannot be written .*No space left on device.*: free disk space"):
        measure(TINY, "bfloat16", 1, 1e9)
