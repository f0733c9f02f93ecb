"""Values that a cost model refuses, and costs by the rates of hardware."""

import dataclasses
import math
from typing import Any

import pytest

from baton.errors import ConfigError
from baton.planning.cost_model import CostModel, LinkModel
from baton.planning.hardware import Hardware, derive
from baton_lab.study.known_hardware import HARDWARE, hardware_of
from baton_lab.study.known_models import SHAPES

COST = CostModel(2, 1e-6, 1e-9, 64)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"num_layers": 0}, "num_layers"),
        ({"linear_s": -1.0}, "linear_s"),
        ({"pair_s": math.nan}, "pair_s"),
        ({"fixed_s": math.inf}, "fixed_s"),
        ({"project_share": 1.5}, "project_share"),
        ({"linear_s": 0.0, "pair_s": 0.0}, "linear_s and pair_s"),
    ],
)
def test_impossible_costs_are_refused_by_name(change: dict[str, Any], name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        dataclasses.replace(COST, **change)


@pytest.mark.parametrize(("link", "name"), [((-1.0, 1.0), "latency_s"), ((0.0, 0.0), "bandwidth")])
def test_impossible_links_are_refused_by_name(link: tuple[float, float], name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        LinkModel(*link)


def test_link_seconds() -> None:
    assert LinkModel(0.5, 100.0).seconds(50) == 1.0
    assert LinkModel().seconds(10**12) == 0.0


def test_costs_from_flops_and_bytes() -> None:
    """Llama-3.1-8B: 218 million weights a layer, 16,384 FLOPs a pair, 4 KiB of KV a token."""
    cost = derive(SHAPES["llama-3.1-8b"], Hardware(4e14, 2e14, LinkModel(1e-5, 1e10), memory_bandwidth=1e12))
    assert cost.linear_s == pytest.approx(2 * 218_103_808 / 4e14)
    assert cost.pair_s == 16_384 / 2e14
    assert cost.kv_bytes == 4096
    assert cost.copy_s == 2 * 4096 / 1e12
    assert cost.link == LinkModel(1e-5, 1e10)


def test_attention_that_stores_its_scores_costs_by_heads() -> None:
    """Falcon-7B's 71 heads of 64 against Llama-7B's 32 of 128: 1.1 times the FLOPs, 2.2 times the scores."""
    stores = Hardware(1e14, 1e18, LinkModel(), scores_per_s=1e10)
    falcon, llama = (derive(SHAPES[name], stores).pair_s for name in ("falcon-7b", "llama-7b"))
    assert falcon / llama == pytest.approx(71 / 32)


def test_rates_must_be_above_zero() -> None:
    with pytest.raises(ConfigError, match="pair_flops"):
        Hardware(1e12, 0.0, LinkModel())


def test_unknown_hardware_lists_the_known() -> None:
    assert hardware_of("cpu-core") is HARDWARE["cpu-core"]
    with pytest.raises(ConfigError, match="h100-flash"):
        hardware_of("abacus")
