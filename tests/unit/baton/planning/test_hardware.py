"""Costs derived from a model's FLOPs and bytes and from rates: each byte is read once, and each FLOP computed once."""

import dataclasses
import math

import pytest

from baton.planning.hardware import Hardware, ModelCosts, cpu_rank, derive
from baton.planning.work_cost import StepWork
from baton_lab.study.known_hardware import hardware_of
from baton_lab.study.known_models import SHAPES

SHAPE = SHAPES["smollm2-135m"]
RATES = cpu_rank(2, SHAPE.dtype_bytes)
NOMINAL = ModelCosts.of(SHAPE, RATES)


def test_a_step_reads_weights_and_kv_once() -> None:
    weights = SHAPE.num_layers * SHAPE.layer_weights + SHAPE.vocab * SHAPE.hidden
    assert 130e6 < weights < 140e6
    read = 2 * weights + 8 * 1000 * 23_040
    computed = 8 * 2 * weights
    expected = read / RATES.memory_bandwidth + computed / RATES.linear_flops
    assert NOMINAL.step.plain_s(8, 1000) == pytest.approx(expected)
    pairs = NOMINAL.step.seconds(StepWork(8, 8000, 24_000)) - expected
    assert pairs == pytest.approx(16_000 * SHAPE.num_layers * SHAPE.pair_flops / RATES.pair_flops)


def test_a_mixture_reads_more_experts_with_more_tokens() -> None:
    """The derived time lies within a fifth of the time to read, for as many tokens as it is made for."""
    shape = dataclasses.replace(SHAPE, ffn=SHAPE.ffn // 4, num_experts=64, num_active_experts=4)
    rates = dataclasses.replace(RATES, linear_flops=1e18)
    cost = ModelCosts.of(shape, rates).step
    assert cost.step_s == pytest.approx(2 * shape.step_weights / rates.memory_bandwidth)
    for num_tokens in (1, 4, 8, 16):
        read_s = 2 * shape.read_weights(num_tokens) / rates.memory_bandwidth
        assert cost.step_s + (num_tokens - 1) * cost.token_s == pytest.approx(read_s, rel=0.2)


def test_weights_of_fewer_bytes_are_read_in_less_time() -> None:
    halved = ModelCosts.of(SHAPE, RATES, bytes_per_weight=1)
    assert (NOMINAL.bytes_per_weight, halved.bytes_per_weight) == (SHAPE.dtype_bytes, 1) == (2, 1)
    assert halved.step.step_s == pytest.approx(NOMINAL.step.step_s / 2)
    assert (halved.step.token_s, halved.step.key_s) == (NOMINAL.step.token_s, NOMINAL.step.key_s)
    assert halved.prefill == NOMINAL.prefill == derive(SHAPE, RATES)


def test_steps_run_on_the_engine_and_prefill_on_the_rank() -> None:
    engine = hardware_of("h100-flash")
    costs = ModelCosts.of(SHAPE, RATES, engine=engine)
    assert costs.prefill == NOMINAL.prefill
    assert costs.step == ModelCosts.of(SHAPE, engine).step != NOMINAL.step


def test_rates_grow_with_threads_up_to_the_shared_bandwidth_and_with_the_dtype() -> None:
    assert cpu_rank(2, 2).linear_flops == 2 * cpu_rank(1, 2).linear_flops > cpu_rank(1, 4).linear_flops
    core = Hardware(1e11, 2e11, cpu_rank(1, 2).link, memory_bandwidth=1e10)
    few, many = (core.on_cores(num_threads, 3e10) for num_threads in (2, 8))
    assert (few.linear_flops, few.pair_flops, few.memory_bandwidth) == (2e11, 4e11, 2e10)
    assert (many.linear_flops, many.pair_flops, many.memory_bandwidth) == (8e11, 16e11, 3e10)
    assert core.on_cores(8, math.inf).memory_bandwidth == 8e10 < math.inf
