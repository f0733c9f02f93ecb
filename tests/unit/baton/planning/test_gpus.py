"""Predictions from data sheets, against the steps and the prefill that were measured on two GPUs."""

import json
from pathlib import Path

import pytest

from baton.planning.gpus import ASSUMED, gpu_of, gpu_rank
from baton.planning.hardware import ModelCosts, cpu_rank
from baton.planning.model_shape import ModelShape
from baton.planning.planner import ChainPlanner
from baton.types import TokenRange

SHAPE = ModelShape(32, 4096, 32, 8, 128, ffn=14336, vocab=32000)
"""Mistral 7B in bf16, with whose shape both cards were measured."""
RESULTS = Path(__file__).parents[4] / "benchmarks" / "results"
CARDS = {"h100": "NVIDIA H100 80GB HBM3", "h200": "NVIDIA H200"}


def measured(card: str, case: str, metric: str) -> float:
    """Milliseconds of the card's committed row."""
    rows = map(json.loads, (RESULTS / card / "cuda.json").read_text().splitlines())
    return next(float(row["value"]) for row in rows if (row["case"], row["metric"]) == (case, metric))


def planner_of(card: str) -> ChainPlanner:
    """Return a planner of one rank on the card, with the rates of the card's data sheet."""
    return ChainPlanner(ModelCosts.of(SHAPE, gpu_rank(CARDS[card], 2)), max_ranks=1, max_tokens=8192)


@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize(("batch", "context"), [(16, 4096), (64, 1024)])
def test_steps_are_those_that_were_measured(card: str, batch: int, context: int) -> None:
    taken_ms = measured(card, f"batch={batch},context={context},model=7b", "step_ms")
    assert 1e3 * planner_of(card).step_s(batch, context) == pytest.approx(taken_ms, rel=0.15)


@pytest.mark.parametrize("card", CARDS)
def test_a_prefill_is_the_one_that_was_measured(card: str) -> None:
    predicted_ms = 1e3 * planner_of(card).ttft_s([TokenRange(0, 8192)])
    assert predicted_ms == pytest.approx(measured(card, "tokens=8192,model=7b", "prefill_ms"), rel=0.15)


@pytest.mark.parametrize(("known", "other"), [("h100", "h200"), ("h200", "h100")])
def test_what_one_card_reaches_predicts_the_other(known: str, other: str) -> None:
    """Fractions of the data sheet that are fitted to one card alone: of its bandwidth and of its FLOP/s."""
    cases = [(16, 4096), (64, 1024)]
    fixed_s = SHAPE.num_layers * gpu_rank(CARDS[known], 2).fixed_s

    def step_ratio(card: str, batch: int, context: int) -> float:
        """Measured over predicted time in which a step reads memory."""
        taken_s = measured(card, f"batch={batch},context={context},model=7b", "step_ms") / 1e3
        return (taken_s - fixed_s) / (planner_of(card).step_s(batch, context) - fixed_s)

    def prefill_ratio(card: str) -> float:
        predicted_s = planner_of(card).ttft_s([TokenRange(0, 8192)])
        return measured(card, "tokens=8192,model=7b", "prefill_ms") / 1e3 / predicted_s

    mean_ratio = sum(step_ratio(known, *case) for case in cases) / len(cases)
    for case in cases:
        assert step_ratio(other, *case) / mean_ratio == pytest.approx(1, rel=0.15)
    assert prefill_ratio(other) / prefill_ratio(known) == pytest.approx(1, rel=0.15)


def test_a_launched_step_lasts_as_long_as_its_launches() -> None:
    rows = map(json.loads, (RESULTS / "h200" / "cuda.json").read_text().splitlines())
    case = "setting=auto,users=1,prompt=1024,steps=launched"
    taken_ms = next(float(row["value"]) for row in rows if row["case"].startswith(case) and row["metric"] == "step_ms")
    assert 1e3 * SHAPE.num_layers * gpu_rank(CARDS["h200"], 2).issue_s == pytest.approx(taken_ms, rel=0.25)


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA A100-SXM4-40GB", "A100"),
        ("NVIDIA A100-SXM4-80GB", "A100-SXM4-80GB"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA GH200 480GB", "GH200"),
    ],
)
def test_a_driver_s_name_is_known(name: str, known: str) -> None:
    gpu = gpu_of(name)
    assert gpu is not None and gpu.name == known


def test_an_unknown_gpu_is_a_slow_one_and_no_core() -> None:
    assert gpu_of("") is gpu_of("Quadro P400") is gpu_of("NVIDIA RTX A1000") is None
    assert gpu_rank("Quadro P400", 2) == gpu_rank(ASSUMED.name, 2)
    assert gpu_rank("", 2).linear_flops > 50 * cpu_rank(1, 2).linear_flops
    assert gpu_rank("NVIDIA H200", 4).linear_flops < gpu_rank("NVIDIA H200", 2).linear_flops
