"""What a core reaches is measured once, kept, and what predictions begin with."""

from pathlib import Path

import pytest

from baton.planning.hardware import CoreRates, cpu_rank
from deploy.machine import core_rates
from deploy.machine.calibrations import nominal_calibration, nominal_step_times
from deploy.machine.core_rates import keep_rates, kept_rates, kept_rates_path, measure_core_rates
from deploy.machine.resolved_model import ResolvedModel
from tests.support.models.config_folders import SMALL, write_config

pytestmark = pytest.mark.usefixtures("cache")

RATES = CoreRates(1e11, 5e10, 4e9, 7e9)


@pytest.fixture
def model(tmp_path: Path) -> ResolvedModel:
    return ResolvedModel(write_config(tmp_path / "tiny", SMALL))


def test_without_a_measurement_rates_are_assumed() -> None:
    assert kept_rates(2) is None


def test_predictions_begin_with_what_was_kept(model: ResolvedModel) -> None:
    assumed, assumed_steps = nominal_calibration(model, "bfloat16", 2), step_s(model)
    keep_rates({"2": RATES, "4": RATES})
    made = nominal_calibration(model, "bfloat16", 2)
    assert made.cost.linear_s == pytest.approx(assumed.cost.linear_s * cpu_rank(2, 2).linear_flops / 2e11)
    assert made.cost.pair_s == pytest.approx(assumed.cost.pair_s * cpu_rank(2, 2).pair_flops / 1e11)
    assert made.fingerprint == assumed.fingerprint and not made.is_measured
    assert step_s(model) != assumed_steps


def step_s(model: ResolvedModel) -> float:
    return nominal_step_times(model, "bfloat16", 2, residency="device").step_s(4, 100)


def test_threads_share_the_memory() -> None:
    assert [cpu_rank(threads, 2, RATES).memory_bandwidth for threads in (1, 2, 8)] == [4e9, 7e9, 7e9]


@pytest.mark.parametrize("text", ["", "{", '{"4": {}}', '{"2": {"linear_flops": 1}}', '{"2": {"linear_flops": -1}}'])
def test_damaged_rates_are_ignored(text: str, caplog: pytest.LogCaptureFixture) -> None:
    kept_rates_path().parent.mkdir(parents=True)
    kept_rates_path().write_text(text)
    assert kept_rates(2) is None
    assert "predictions begin with assumed rates" in caplog.text


def test_this_core_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")  # where kernels are built already
    monkeypatch.setattr(core_rates, "kept_rates_path", lambda: tmp_path / "rates.json")
    monkeypatch.setattr(core_rates, "_SECONDS", 0.0)
    rates = measure_core_rates()
    keep_rates(rates)
    assert [kept_rates(2), kept_rates(4)] == [rates["2"], rates["4"]]
    assert all(each.memory_bandwidth <= each.shared_bandwidth for each in rates.values())
