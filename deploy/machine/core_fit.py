"""Selects the division of a machine's cores among workers, and the settings that follow from it.

Of each physical core, one hardware thread computes (`baton.process.topology.computing_cpus`). Each worker is bound to
cores of one NUMA node if the machine has several. Its threads then allocate its memory on this node, because they are
bound before the model is loaded, and the workers of a node share a copy of the weights
(`baton.modeling.checkpoints.shared_weights`). The functions read the profile of a core and the sizes of the model.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from baton.planning.device_profile import DeviceProfile
from baton.planning.hardware import ModelCosts
from baton.planning.model_shape import ModelShape
from baton.planning.work_cost import WorkCost
from baton.process.topology import computing_cpus
from deploy.machine.cluster_plan import WORKER_BYTES, ClusterPlan
from deploy.machine.device_profile import cpu_profile
from deploy.machine.pool_plans import (
    OUTPUT_TOKENS,
    PROMPT_TOKENS,
    SEQUENCE_TOKENS,
    Costs,
    PoolPlan,
    best_plan,
    core_plans,
    reason_for,
)
from deploy.machine.this_machine import Machine

_NUM_SLOTS = (64, 32)
"""Numbers of slots that are considered for an engine, from the largest to the smallest, before its configured
number."""
_STEP_S = 0.1
"""Maximum predicted seconds of a step in which all slots decode, each with `PROMPT_TOKENS` tokens."""
_KV_SHARE = 0.5
"""Fraction of the free memory for KV, as in `generate_workers.engine.memory_limits`."""
_LAYER_JOINS = 6
"""Number of times in a layer that the threads of a worker wait for each other."""
_JOIN_S = 7e-7
"""Assumed seconds of such a wait for each doubling of the number of threads, as in a tree barrier."""

_Place = tuple[tuple[int, ...], int]
"""The CPUs of a NUMA node that compute, and the free bytes of its memory; 0: not known."""


def divide_cores(plan: ClusterPlan, machine: Machine) -> tuple[dict[str, dict[str, Any]], str]:
    """Return the settings of the pools with which the cores of `machine` serve the model of `plan` best, and the
    reason. Raises ModelError or ConfigError if the model is not valid.

    If the container of this process may use the time of fewer cores than the machine has, the machine counts as one
    node with that number of cores. Workers are then not bound, because other containers use the same cores.
    """
    model, formats = plan.model, plan.config.model
    shape, core = model.shape(formats.dtype), cpu_profile(1, model.shape(formats.dtype).dtype_bytes)
    size = model.bytes_per_weight(formats.dtype, formats.weights)
    costs = core_costs(shape, core, plan.config.generate.num_slots, bytes_per_weight=size)
    places = _places(machine)
    nodes = [cpus for cpus, _ in places]
    found = core_plans(costs, [len(cpus) for cpus in nodes], _fits(plan, places, machine.available_bytes))
    chosen = best_plan(found)
    on_nodes = f" on {len(nodes)} NUMA nodes" if len(nodes) > 1 else ""
    why = f"{sum(map(len, nodes))} cores{on_nodes}: {reason_for(chosen, found)}"
    settings = _settings_of(chosen, nodes, machine)
    used_nodes = 1 if chosen.num_workers == 1 else chosen.num_nodes
    step = costs.of(chosen.engine_units, used_nodes / (len(nodes) * chosen.num_engines)).step
    settings["generate"]["num_slots"] = _num_slots(plan, chosen, step, machine.available_bytes)
    return settings, why


def _num_slots(plan: ClusterPlan, pools: PoolPlan, step: WorkCost, available_bytes: int) -> int:
    """Return the number of slots of each engine: the largest of `_NUM_SLOTS` for which two conditions hold, or the
    configured number if that is larger. Each slot has KV memory for `SEQUENCE_TOKENS` tokens, and a step of all slots
    is predicted to take less than `_STEP_S` seconds. `step`: cost of an engine's step. `available_bytes`: memory for
    all workers.

    If the engines reserve memory for each slot, the configured number is returned. They do so with residencies other
    than `device`, with limited device memory, with a draft model, and for drafts that select keys.
    """
    generate = plan.config.generate
    reserves = generate.speculation not in ("auto", "off", "ngram", "streaming")
    if generate.residency != "device" or generate.device_memory_bytes or reserves:
        return generate.num_slots
    token_bytes = plan.model.token_bytes(plan.config.model.dtype)
    prompt_bytes = pools.num_chains * pools.num_ranks * plan.max_tokens * token_bytes
    taken_bytes = pools.num_workers * WORKER_BYTES + pools.num_nodes * plan.copy_bytes("cpu") + prompt_bytes
    kv_bytes = generate.kv_memory_bytes or int(_KV_SHARE * (available_bytes - taken_bytes)) // pools.num_engines
    most = kv_bytes // (SEQUENCE_TOKENS * token_bytes)
    fitting = (each for each in _NUM_SLOTS if each <= most and step.plain_s(each, PROMPT_TOKENS) < _STEP_S)
    return max(next(fitting, 0), generate.num_slots)


def core_costs(
    shape: ModelShape, core: DeviceProfile, num_slots: int, *, bytes_per_weight: float | None = None
) -> Costs:
    """Return the costs of a model on a machine's cores. `core`: profile of one core, with the memory bandwidth of all.
    `num_slots`: number of sequences in an engine's batch. `bytes_per_weight` as in `ModelCosts.of`."""

    @cache
    def of(num_threads: int, part: float) -> ModelCosts:
        rates = core.hardware.on_cores(num_threads, part * core.shared_bandwidth)
        rates = replace(rates, fixed_s=rates.fixed_s + _LAYER_JOINS * _JOIN_S * math.log2(num_threads))
        return ModelCosts.of(shape, rates, bytes_per_weight=bytes_per_weight)

    return Costs(of, num_slots)


def _places(machine: Machine) -> list[_Place]:
    """Return the places of a machine, the largest first."""
    nodes = computing_cpus(machine.nodes)
    if machine.is_limited:
        cpus = tuple(cpu for node in nodes for cpu in node)
        return [(cpus[: max(int(machine.cpu_quota), 1)], 0)]
    places = [(cpus, node.free_bytes) for cpus, node in zip(nodes, machine.nodes, strict=True)]
    return sorted(places, key=lambda place: (-len(place[0]), -place[1]))


def _fits(plan: ClusterPlan, places: Sequence[_Place], available_bytes: int) -> Callable[[PoolPlan], bool]:
    """Return a function that returns True if the memory of the machine, and of each node that a PoolPlan uses, holds
    its workers, one copy of the weights for each node, and KV: the configured KV of each engine, or that of a batch of
    nominal requests, and a prompt of the greatest length for each rank."""
    generate, dtype = plan.config.generate, plan.config.model.dtype
    token_bytes = plan.model.token_bytes(dtype)
    copy_bytes = plan.copy_bytes("cpu")
    kv_bytes = generate.kv_memory_bytes or generate.num_slots * (PROMPT_TOKENS + OUTPUT_TOKENS) * token_bytes
    prompt_bytes = plan.max_tokens * token_bytes

    def fits(pools: PoolPlan) -> bool:
        num_ranks = pools.num_chains * pools.num_ranks
        needed = pools.num_workers * WORKER_BYTES + pools.num_engines * kv_bytes + num_ranks * prompt_bytes
        on_node = copy_bytes + needed // pools.num_nodes
        free = [free_bytes or on_node for _, free_bytes in places[: pools.num_nodes]]
        return on_node <= min(free) and on_node * pools.num_nodes <= available_bytes

    return fits


def _settings_of(plan: PoolPlan, nodes: Sequence[tuple[int, ...]], machine: Machine) -> dict[str, dict[str, Any]]:
    """Return the settings of the pools. `nodes`: CPUs of each NUMA node that compute. Each worker is bound to CPUs of
    its own, on one node. A single worker that uses several nodes is bound to the CPUs of all."""
    used = nodes[: plan.num_nodes]
    if plan.num_workers == 1:
        used = [tuple(sorted(cpu for cpus in used for cpu in cpus))]
    num_engines, num_ranks = plan.num_engines // len(used), plan.num_chains * plan.num_ranks // len(used)
    engines, ranks = list[tuple[int, ...]](), list[tuple[int, ...]]()
    for cpus in used:
        engines += _parts(cpus, num_engines, plan.engine_units)
        ranks += _parts(cpus[num_engines * plan.engine_units :], num_ranks, plan.rank_units)
    prefill: dict[str, Any] = {"num_groups": plan.num_chains}
    if plan.num_chains:
        prefill |= {"num_ranks": plan.num_ranks, "num_threads": plan.rank_units}
    generate: dict[str, Any] = {"num_groups": plan.num_engines, "num_threads": plan.engine_units}
    if not machine.is_limited and set(engines[0]) != machine.cpus:
        prefill |= {"cores": tuple(ranks)}
        generate |= {"cores": tuple(engines)}
    return {"prefill": prefill, "generate": generate}


def _parts(cpus: tuple[int, ...], number: int, size: int) -> list[tuple[int, ...]]:
    """Return the first `number` groups of `size` CPUs."""
    return [cpus[each * size :][:size] for each in range(number)]
