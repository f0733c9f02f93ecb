"""Chooses devices, ranks, threads and cores for a cluster on one machine, if the configuration does not set them.

`baton serve` and `baton doctor` call `arrange` before anything is started. Settings of the user are never changed. The
device `auto` becomes the machine's GPUs, if there are enough of them, and else the CPU. If the user has set any of the
fields in `_POOLS`, such as the number of ranks, or different devices for the two roles, the module chooses no ranks,
threads or cores. It then chooses only the device and the settings that follow from it: the sizes of an engine on a GPU,
and `_TOGETHER_STEPS`, which limit the size and the duration of a step, if the engines also prefill. Blocks for some
milliseconds, for up to a second on a machine with many cores, and longer if torch has not been imported yet.
"""

from dataclasses import replace

from deploy.config.cluster import ClusterConfig
from deploy.config.file import WrittenConfig
from deploy.machine.cluster_plan import ClusterPlan
from deploy.machine.core_fit import divide_cores
from deploy.machine.gpu_fit import engine_sizes, gpu_costs, usable_gpus
from deploy.machine.pool_plans import best_plan, gpu_plans, reason_for
from deploy.machine.resolved_model import ResolvedModel
from deploy.machine.this_machine import Machine

_POOLS = {
    "prefill": ("num_groups", "num_ranks", "num_threads", "cores", "across_nodes", "gpu_share"),
    "generate": ("num_groups", "num_threads", "cores", "gpu_share"),
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
    plan = ClusterPlan(written.config, model)
    if not plan.config.ray.address:
        gpus, note = usable_gpus(plan.config, model, machine)
        plan = replace(plan, gpus=gpus, gpu_note=note)
        if gpus:
            plan = _on_gpus(plan, written)
        elif _is_open(written) and _device(plan.config) != "cuda":
            settings, why = divide_cores(plan, machine)
            plan = replace(plan, config=written.with_choices(plan.config, settings), why=why)
    config = plan.config
    if not config.prefill.num_groups:
        on_gpu = {"max_batched_tokens": _CUDA_STEP_TOKENS} if config.generate.device == "cuda" else {}
        config = written.with_choices(config, {"generate": _TOGETHER_STEPS | on_gpu})
    return replace(plan, config=config)


def _is_open(written: WrittenConfig) -> bool:
    """Return whether `arrange` may choose the pools: the configuration permits it, sets no field of `_POOLS`, and both
    roles have the same device, which is not the emulated one."""
    config = written.config
    asks_for_chains = config.autoscaling.mode != "off" or config.orchestrator.disaggregation == "always"
    if config.arrangement == "configured" or asks_for_chains or _device(config) not in ("auto", "cpu", "cuda"):
        return False
    return not any(written.writes(section, name) for section, names in _POOLS.items() for name in names)


def _device(config: ClusterConfig) -> str:
    """Return the device that the user has set for one role or both, or auto if none is set. Return an empty string if
    the roles have different devices."""
    chosen = {config.prefill.device, config.generate.device} - {"auto"}
    return "" if len(chosen) > 1 else next(iter(chosen), "auto")


def _on_gpus(plan: ClusterPlan, written: WrittenConfig) -> ClusterPlan:
    """Return the plan with one worker on each usable GPU, and with sizes of engines that fit a GPU. If the user has
    configured the pools, roles with the device auto use GPUs only if there are enough for all workers."""
    config, gpus, device = plan.config, plan.gpus, _device(plan.config)
    fullest = min(gpus, key=lambda gpu: gpu.free_bytes)
    costs = gpu_costs(plan.model, config.model.dtype, fullest, config.generate.num_slots)
    sizes = engine_sizes(config, plan.model, fullest, costs.of(1, 1.0).step)
    engine = {"device": "cuda", "max_batched_tokens": _CUDA_STEP_TOKENS, **sizes}
    on_gpus, why = written.with_choices(config, {"prefill": {"device": "cuda"}, "generate": engine}), ""
    if _is_open(written):
        found = gpu_plans(replace(costs, num_slots=on_gpus.generate.num_slots), len(gpus))
        chosen = best_plan(found)
        prefill = {"num_groups": chosen.num_chains, "num_ranks": max(chosen.num_ranks, 1)}
        on_gpus = written.with_choices(on_gpus, {"prefill": prefill, "generate": {"num_groups": chosen.num_engines}})
        why = f"{len(gpus)} x {gpus[0].name}: {reason_for(chosen, found)}"
    elif device == "auto" and on_gpus.num_gpus > len(gpus):
        few = f"the configured workers run on the CPU: {on_gpus.num_gpus} GPUs are needed, {len(gpus)} can be used"
        return replace(plan, gpus=(), gpu_note=f"{few}; use fewer ranks or groups, or set device = cuda for one role")
    elif not device or on_gpus.num_gpus > len(gpus):
        on_gpus = written.with_choices(config, {"generate": engine if config.generate.device == "cuda" else {}})
    return replace(plan, config=on_gpus, why=why)
