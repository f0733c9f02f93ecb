"""Chooses ranks, threads and cores for a cluster on one machine, if the configuration does not set them.

`baton serve` and `baton doctor` call `arrange` before anything is started. Settings of the user are never changed. If
the user has set any of the fields in `_POOLS`, such as the number of ranks, the module chooses no ranks, threads or
cores. It then chooses only the settings in `_TOGETHER_STEPS`, which limit the size and the duration of a step, and only
if the engines also prefill. Blocks for some milliseconds, and longer if torch has not been imported yet.
"""

from typing import Any

from deploy.config.cluster import ClusterConfig
from deploy.config.file import WrittenConfig
from deploy.machine.calibrations import nominal_calibration, nominal_step_times
from deploy.machine.cluster_plan import WORKER_BYTES, ClusterPlan
from deploy.machine.core_plans import CorePlan, Costs, best_core_plan, core_plans
from deploy.machine.resolved_model import ResolvedModel
from deploy.machine.this_machine import Machine

_POOLS = {
    "prefill": ("num_groups", "num_ranks", "num_threads", "cores", "device", "across_nodes"),
    "generate": ("num_groups", "num_threads", "cores", "device"),
}
"""Fields that define the prefill and generation pools, by section. If the user sets any of them, `arrange` does not
choose the pools."""
_TOGETHER_STEPS = {"max_batched_tokens": 512, "step_budget_s": 0.3}
"""Settings of an engine that computes all prefills. A step prefills a limited number of tokens. If prompts arrive
together and exceed this limit, they are spread over several steps, which is nearly as fast. While other requests
generate, a step with prefill lasts up to 0.3 s, or up to three times as long as decoding alone if that is longer."""
_CUDA_STEP_TOKENS = 2048
"""Maximum number of prompt tokens in a step on a GPU. It is larger than on a CPU, because a GPU computes thousands of
tokens in the time in which a CPU computes a few hundred."""


def arrange(written: WrittenConfig, model: ResolvedModel, machine: Machine) -> ClusterPlan:
    """Return the plan of a cluster that serves `model`. Fields that the user has not set are chosen for `machine`.
    Raises ConfigError if the configuration is not valid, and ModelError if the model is not."""
    config, why = written.config, ""
    if _is_open(written):
        chosen, why = _choose(config, model, machine)
        config = written.with_choices(config, _settings_of(chosen, sorted(machine.cores)))
    if not config.prefill.num_groups:
        on_gpu = {"max_batched_tokens": _CUDA_STEP_TOKENS} if config.generate.device == "cuda" else {}
        config = written.with_choices(config, {"generate": _TOGETHER_STEPS | on_gpu})
    return ClusterPlan(config, model, why)


def _is_open(written: WrittenConfig) -> bool:
    """Return whether `arrange` may choose the pools: the configuration permits it and sets no field of `_POOLS`."""
    config = written.config
    asks_for_chains = config.autoscaling.mode != "off" or config.orchestrator.disaggregation == "always"
    if config.arrangement == "configured" or config.ray.address or asks_for_chains:
        return False
    return not any(written.writes(section, name) for section, names in _POOLS.items() for name in names)


def _choose(config: ClusterConfig, model: ResolvedModel, machine: Machine) -> tuple[CorePlan, str]:
    """Return the best plan for this machine, and one line of text. The line compares it with the best plan of the other
    kind (prefill chain, or one engine that also prefills)."""
    dtype, quantization, residency = config.model.dtype, config.model.quantization, config.generate.residency
    costs = Costs(
        prefill=lambda threads: nominal_calibration(model, dtype, threads, quantization),
        steps=lambda threads: nominal_step_times(model, dtype, threads, residency=residency, quantization=quantization),
        num_slots=config.generate.num_slots,
    )
    most_workers = machine.available_bytes // (model.weight_bytes(dtype) + WORKER_BYTES)
    found = core_plans(costs, len(machine.cores), most_workers)
    chosen = best_core_plan(found)
    others = [plan for plan in found if bool(plan.num_ranks) != bool(chosen.num_ranks)]
    beside = f", rather than {best_core_plan(others)}" if others else ""
    return chosen, f"{len(machine.cores)} cores: {chosen}{beside}"


def _settings_of(plan: CorePlan, cores: list[int]) -> dict[str, dict[str, Any]]:
    """Return the settings of the pools for a plan. The ranks of a chain and the generation engine are pinned to
    separate cores."""
    if not plan.num_ranks:
        return {"prefill": {"num_groups": 0}, "generate": {"num_threads": plan.engine_threads}}
    engine, ranks = cores[: plan.engine_threads], cores[plan.engine_threads :]
    return {
        "prefill": {"num_groups": 1, "num_ranks": plan.num_ranks, "cores": tuple((core,) for core in ranks)},
        "generate": {"num_threads": plan.engine_threads, "cores": (tuple(engine),)},
    }
