"""Creates the planner of a cluster, with the costs at which its predictions begin.

Costs are derived from the model's shape and the rates of the workers' devices. Rates are those of the profile that was
measured on this machine for its processor or its GPU (`deploy.machine.device_profile`). Without a profile, those of a
CPU are assumed, and those of a GPU follow from its data sheet (`baton.planning.gpus`). Functions block while they read
profiles.
"""

from baton.planning.chain.wavefront import chain_ttft
from baton.planning.cost_model import BATON
from baton.planning.device_profile import DeviceProfile
from baton.planning.hardware import ModelCosts, derive
from baton.planning.local_prefill import LocalPrefill
from baton.planning.planner import ChainPlanner
from deploy.config.environment import use_threads
from deploy.machine.cluster_plan import ClusterPlan
from deploy.machine.device_profile import DTYPE_BYTES, cpu_profile, gpu_profile
from deploy.machine.resolved_model import ResolvedModel
from deploy.machine.this_machine import gpu_name

_SPEED_TOKENS = 1024
"""Number of prompt tokens with which the speeds of an engine and of a prefill rank are compared."""


def cpu_costs(model: ResolvedModel, dtype: str, num_threads: int, weights: str = "stored") -> ModelCosts:
    """Return the costs of `model` on `num_threads` cores of this machine. Raises ModelError."""
    shape = model.shape(dtype)
    rates = cpu_profile(num_threads, shape.dtype_bytes).hardware
    return ModelCosts.of(shape, rates, bytes_per_weight=model.bytes_per_weight(dtype, weights))


def served_planner(plan: ClusterPlan) -> ChainPlanner:
    """Create the planner for a cluster, which takes up to some seconds. Raises ModelError if the model is not valid."""
    rank, engine = worker_profiles(plan)
    prefill, generate, formats = plan.config.prefill, plan.config.generate, plan.config.model
    size = plan.model.bytes_per_weight(formats.dtype, plan.weights_on(generate.device))
    shape = plan.model.shape(formats.dtype)
    costs = ModelCosts.of(shape, rank.hardware, engine=engine.hardware, bytes_per_weight=size)
    on_engine = derive(shape, engine.hardware)
    rank_s, engine_s = (float(chain_ttft([_SPEED_TOKENS], each, BATON)) for each in (costs.prefill, on_engine))
    return ChainPlanner(
        costs,
        max_ranks=prefill.num_ranks,
        max_tokens=plan.max_tokens,
        local=LocalPrefill(
            speed=rank_s / engine_s,
            max_step_tokens=generate.max_batched_tokens,
            step_budget_s=generate.step_budget_s,
        ),
        devices=frozenset({rank.name, engine.name}),
    )


def worker_profiles(plan: ClusterPlan) -> tuple[DeviceProfile, DeviceProfile]:
    """Return the profiles of a prefill rank and of a generation engine on this machine."""
    dtype_bytes = DTYPE_BYTES[plan.config.model.dtype]
    rank, engine = (
        gpu_profile(gpu_name(), dtype_bytes, pool.gpu_share)
        if pool.device == "cuda"
        else cpu_profile(use_threads(pool.num_threads), dtype_bytes, pool.device)
        for pool in (plan.config.prefill, plan.config.generate)
    )
    return rank, engine
