"""Calibrations: fitted from points, saved whole, and refused with file, field and remedy when something is wrong."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from baton.errors import ConfigError, InvalidArgumentError
from baton.planning.calibration import Calibration, calibrate_chain, dumps, load, loads, nominal, save
from baton.planning.cost_model import Kernel, LinkModel
from baton.planning.fit import RankRow
from baton.planning.hardware import cpu_rank
from baton_lab.study.known_models import SHAPES
from tests.support.calibrating import calibrate

SHAPE = SHAPES["smollm2-135m"]
PREFILL = tuple((float(n), 0.02 + 2e-4 * n + 5e-8 * n * n) for n in (256, 512, 1024, 2048))
MESSAGES = tuple((float(size), 1e-4 + size / 2e9) for size in (1e4, 1e6, 1e8))


def calibration() -> Calibration:
    return calibrate(
        "smollm2-135m", "2 x CPU", SHAPE, kernel=Kernel.CAUSAL, prefill_points=PREFILL, link_points=MESSAGES
    )


def test_points_become_costs() -> None:
    cost = calibration().cost
    assert cost.num_layers == 30 and cost.kv_bytes == 768
    assert cost.linear_s * 30 == pytest.approx(2e-4, rel=1e-3)
    assert cost.pair_s * 30 / 2 == pytest.approx(5e-8, rel=1e-3)
    assert cost.fixed_s * 30 == pytest.approx(0.02, rel=1e-3)
    assert cost.link.latency_s == pytest.approx(1e-4, rel=1e-3)
    assert cost.link.bandwidth == pytest.approx(2e9, rel=1e-3)
    assert cost.head_s == pytest.approx(cost.linear_s * SHAPE.head_flops / SHAPE.linear_flops)


@pytest.mark.parametrize("push", [None, LinkModel(1e-3, 1e9), LinkModel()])
def test_calibration_survives_the_file(tmp_path: Path, push: LinkModel | None) -> None:
    made = calibration()
    made = dataclasses.replace(made, cost=dataclasses.replace(made.cost, push=push, issue_s=1e-3, copy_s=1e-9))
    save(made, tmp_path / "machine.json")
    assert load(tmp_path / "machine.json") == made


def assumed() -> Calibration:
    return nominal("smollm2-135m", "2 x CPU", SHAPE, cpu_rank(1, SHAPE.dtype_bytes))


def rows(layer_s: float = 1e-6) -> list[RankRow]:
    return [RankRow(n, before, True, 30 * layer_s * n) for n, before in ((100, 0), (200, 100), (400, 0))]


def test_what_is_assumed_says_so_and_grows_with_threads_and_dtype() -> None:
    assert not assumed().is_measured and calibration().is_measured
    assert cpu_rank(2, 2).linear_flops == 2 * cpu_rank(1, 2).linear_flops > cpu_rank(1, 4).linear_flops


def test_a_chains_rows_become_costs_of_the_same_model_and_machine() -> None:
    origin = assumed()
    made, residual = calibrate_chain(origin, rows(), MESSAGES, request_s=0.02)
    assert made.is_measured and made.fingerprint == origin.fingerprint
    assert made.cost.head_s == 0.02 and residual < 0.1
    assert made.cost.link.bandwidth == pytest.approx(2e9, rel=1e-3)
    assert made.cost.linear_s == pytest.approx(1e-6, rel=0.2)
    again = loads(dumps(made), "text")
    assert again == made


@pytest.mark.parametrize(
    ("points", "latency_s"), [((), 1e-4), (((1e3, 3e-4),), 3e-4), (((1e3, 3e-4), (2e3, 2e-4)), 2.5e-4)]
)
def test_a_link_whose_bandwidth_does_not_show_keeps_the_assumed_one(
    points: tuple[tuple[float, float], ...], latency_s: float
) -> None:
    made, _ = calibrate_chain(assumed(), rows(), points, request_s=0.0)
    assert made.cost.link.bandwidth == assumed().cost.link.bandwidth
    assert made.cost.link.latency_s == pytest.approx(latency_s, rel=0.01)


def test_a_chain_whose_times_do_not_grow_is_refused() -> None:
    constant = [RankRow(n, 0, True, 1.0) for n in (100, 200, 400)]
    with pytest.raises(InvalidArgumentError, match="longer chunks took no longer: measure longer prompts"):
        calibrate_chain(assumed(), constant, (), request_s=0.0)


def test_fingerprint_is_of_model_and_machine_and_not_of_measurements() -> None:
    made = calibration()
    again = dataclasses.replace(made, prefill_points=PREFILL[:2])
    assert again.fingerprint == made.fingerprint and len(made.fingerprint) == 16
    others = [
        dataclasses.replace(made, model="other"),
        dataclasses.replace(made, hardware="4 x CPU"),
        dataclasses.replace(made, kernel=Kernel.DENSE),
        dataclasses.replace(made, shape=SHAPES["llama-7b"]),
    ]
    assert len({made.fingerprint, *(other.fingerprint for other in others)}) == 5


def changed(data: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """The object with one field replaced, or left out for ..."""
    first, _, rest = path.partition(".")
    if rest:
        return {**data, first: changed(data[first], rest, value)}
    return {name: each for name, each in {**data, first: value}.items() if each is not ...}


@pytest.mark.parametrize(
    ("path", "value", "text"),
    [
        ("schema", 0, "schema = 0, and this version reads 1: recreate the file"),
        ("kind", ..., "is not a baton-calibration file"),
        ("model", "", "model = '' is not a text: give a name"),
        ("hardware", ..., "hardware = None is not a text"),
        ("kernel", "sparse", "kernel = 'sparse' is unknown: use dense or causal"),
        ("shape", 3, "shape = 3 is not an object"),
        ("shape.ffn", ..., "shape: ffn is missing"),
        ("cost.linear_s", "fast", "cost: linear_s = 'fast' is not a number: give one"),
        ("cost.pair_s", ..., "cost: pair_s = None is not a number"),
        pytest.param("cost.pair_s", 10**400, "cost: pair_s = 1000", id="huge"),
        ("cost.fixed_s", -1, "fixed_s = -1.0 is out of range"),
        ("rank_rows", [[1, 2]], "rank_rows is not a list of four numbers each: calibrate again"),
        ("link", ..., "link = None is not an object"),
        ("link.bandwidth", 0, "bandwidth = 0.0 is out of range"),
        ("push", {"latency_s": True, "bandwidth": 1}, "push: latency_s = True is not a number"),
        ("prefill_points", [[1]], "prefill_points is not a list of pairs"),
        ("link_points", None, "link_points is not a list of pairs"),
        ("hardware", "9 x CPU", "fingerprint does not match"),
    ],
)
def test_wrong_files_name_file_field_and_remedy(tmp_path: Path, path: str, value: Any, text: str) -> None:
    file = tmp_path / "machine.json"
    save(calibration(), file)
    file.write_text(json.dumps(changed(json.loads(file.read_text()), path, value)))
    with pytest.raises(ConfigError) as caught:
        load(file)
    assert text in str(caught.value) and str(file) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0])
@pytest.mark.parametrize(
    ("field", "point"),
    [
        ("prefill_points", [100.0, 1.0]),
        ("link_points", [100.0, 1.0]),
        ("rank_rows", [100, 0, True, 1.0]),
    ],
)
def test_points_that_nobody_can_have_measured_are_refused(field: str, point: list[float], bad: float) -> None:
    for place in {0, len(point) - 1}:
        data = json.loads(dumps(calibration()))
        data[field] = [[bad if at == place else each for at, each in enumerate(point)]]
        with pytest.raises(ConfigError, match=f"^text: {field}.* calibrate again"):
            loads(json.dumps(data), "text")
    numbers = tuple(bad if at == len(point) - 1 else each for at, each in enumerate(point))
    made: Any = (RankRow(*numbers),) if field == "rank_rows" else (numbers,)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"{field}: .* is out of range: use finite numbers of at least 0"):
        dataclasses.replace(calibration(), **{field: made})


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -1.0])
def test_times_that_cannot_be_fitted_are_refused(seconds: float) -> None:
    with pytest.raises(InvalidArgumentError, match="must be above 0, and finite"):
        calibrate_chain(assumed(), [*rows(), RankRow(300, 0, True, seconds)], MESSAGES, request_s=0.0)
