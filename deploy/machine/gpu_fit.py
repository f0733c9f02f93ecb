"""Selects the GPUs of a machine that can hold a model, and the sizes of a generation engine on one of them.

The functions have no side effects. The GPUs are those of a `Machine`, which the NVIDIA driver has reported.
"""

from collections import Counter
from operator import attrgetter

from baton.planning.hardware import ModelCosts
from baton.planning.work_cost import WorkCost
from deploy.config.cluster import ClusterConfig
from deploy.machine.cluster_plan import CUDA_WORKER_BYTES, WORKER_BYTES
from deploy.machine.device_profile import gpu_profile
from deploy.machine.pool_plans import PROMPT_TOKENS, SEQUENCE_TOKENS, Costs
from deploy.machine.resolved_model import ResolvedModel
from deploy.machine.this_machine import GpuState, Machine

_ON_GPUS = {
    "model.weights": ("stored", "bfloat16"),
    "generate.residency": ("device", "host"),
    "generate.speculation": ("auto", "off", "streaming", "ngram", "model"),
}
"""Values of settings with which the device `auto` selects GPUs. Others do not support GPUs, or are slower on them than
on a CPU. The first value of each setting is its default."""
_NUM_SLOTS = range(256, 0, -16)
"""Numbers of slots that are considered for an engine on a GPU, from the largest to the smallest."""
_STEP_S = 0.05
"""Maximum predicted seconds of a step in which all slots decode, each with `PROMPT_TOKENS` tokens."""
_MOST_TOKENS = 2**17
"""Maximum value of `generate.max_slot_tokens` that is chosen. Each slot has a block table for this number of tokens."""
_BLOCK_TOKENS = 64
"""Unit of `generate.max_slot_tokens`: the number of tokens of a page of KV."""
_KV_SHARE = 0.9
"""Fraction of a GPU's memory for KV, after the weights are loaded, as in `generate_workers.engine.memory_limits`."""
_MOST_VERIFIED = 64
"""Number of tokens whose logits a step may need to verify drafts, even if the engine has fewer slots."""
_LOGIT_BYTES = 12
"""Estimated number of device bytes per logit of a step that draws tokens on the GPU."""


def usable_gpus(config: ClusterConfig, model: ResolvedModel, machine: Machine) -> tuple[tuple[GpuState, ...], str]:
    """Return the GPUs that the workers of `config` can use, and one line of text about the others. The GPUs are those
    of the most frequent kind that have enough free memory, at most one for each worker for which the host's memory
    suffices. The text names each other GPU, its reason and the remedy; it is empty if all GPUs are returned, or if the
    configuration asks for another device."""
    devices = {config.prefill.device, config.generate.device}
    is_asked = "cuda" in devices
    if not machine.gpus or not (is_asked or devices == {"auto"}):
        return (), ""
    obstacles = [] if machine.has_cuda else ["torch is built without CUDA: install a torch with CUDA"]
    for name, values in _ON_GPUS.items():
        if (value := attrgetter(name)(config)) not in values:
            obstacles.append(f"{name} = {value} needs a CPU: set it to {values[0]}")
    if obstacles and not is_asked:
        return (), f"the GPUs of this machine are not used, because {obstacles[0]}, or set device = cpu"
    dtype = config.model.dtype
    needed = model.weight_bytes(dtype) + WORKER_BYTES + SEQUENCE_TOKENS * model.token_bytes(dtype)
    fitting = [gpu for gpu in machine.gpus if gpu.free_bytes >= needed or (is_asked and not gpu.total_bytes)]
    kinds = Counter(gpu.name for gpu in fitting).most_common(1)
    most = max(machine.available_bytes // CUDA_WORKER_BYTES, 1)
    usable = tuple(gpu for gpu in fitting if gpu.name == kinds[0][0])[:most]
    kind = usable[0].name if usable else ""
    reasons: dict[str, list[str]] = {}
    for gpu in machine.gpus:
        if gpu not in usable:
            reasons.setdefault(_reason(gpu, needed, kind), []).append(str(gpu.index))
    return usable, "; ".join(f"not used: GPU {', '.join(indices)}, {reason}" for reason, indices in reasons.items())


def _reason(gpu: GpuState, needed: int, kind: str) -> str:
    """Return why a GPU is not used. `needed`: bytes that a worker needs. `kind`: name of the GPUs that are used."""
    if not gpu.total_bytes:
        return "whose memory is unknown: set generate.device = cuda to use it"
    if gpu.free_bytes >= needed:
        few = f"because the host has too little memory: each worker needs {CUDA_WORKER_BYTES / 2**30:.0f} GiB"
        return few if gpu.name == kind else f"because {gpu.name} is not {kind}: set CUDA_VISIBLE_DEVICES to choose"
    remedy = "choose a smaller model" if gpu.total_bytes < needed else "end the processes that use it"
    sizes = f"{gpu.free_bytes / 2**30:.2f} GiB free of {needed / 2**30:.2f} GiB for weights and activations"
    return f"{sizes}: {remedy}, or set device = cpu"


def gpu_costs(model: ResolvedModel, dtype: str, gpu: GpuState, num_slots: int) -> Costs:
    """Return the costs of `model` on GPUs of the kind of `gpu`, for engines with `num_slots` slots. Rates are those of
    a profile that was measured on this machine, or else nominal ones."""
    shape = model.shape(dtype)
    rates = gpu_profile(gpu.name, shape.dtype_bytes).hardware
    costs = ModelCosts.of(shape, rates)
    return Costs(lambda *_: costs, num_slots, unit="GPU", push=rates.link)


def engine_sizes(config: ClusterConfig, model: ResolvedModel, gpu: GpuState, step: WorkCost) -> dict[str, int]:
    """Return settings of an engine on a GPU: the number of slots and the tokens of a slot. Empty if the memory of the
    GPU is unknown or too small for a sequence, or if KV is not in its memory. `step`: cost of a step.

    The number of slots is the largest one for which each slot has KV memory for `SEQUENCE_TOKENS` tokens, and a step of
    all slots is predicted to take less than `_STEP_S` seconds. A slot has as many tokens as the model has positions, at
    most `_MOST_TOKENS`, and at most as many as fit into the KV memory."""
    generate, dtype = config.generate, config.model.dtype
    if generate.residency != "device" or not gpu.total_bytes:
        return {}
    free_bytes = generate.device_memory_bytes or int(generate.gpu_share * gpu.free_bytes)
    kv_bytes = int(_KV_SHARE * (free_bytes - WORKER_BYTES - model.weight_bytes(dtype)))
    kv_bytes = min(kv_bytes, generate.kv_memory_bytes or kv_bytes)
    logit_bytes, token_bytes = _LOGIT_BYTES * model.shape(dtype).vocab, model.token_bytes(dtype)
    most = kv_bytes // (SEQUENCE_TOKENS * token_bytes + logit_bytes)
    if most < 1:
        return {}
    fast = (each for each in _NUM_SLOTS if each <= most and step.plain_s(each, PROMPT_TOKENS) < _STEP_S)
    num_slots = next(fast, min(_NUM_SLOTS))
    if kv_bytes < SEQUENCE_TOKENS * token_bytes + num_slots * logit_bytes:
        num_slots = most  # fewer sequences, so that one has enough tokens
    num_blocks = max((kv_bytes - max(num_slots, _MOST_VERIFIED) * logit_bytes) // (token_bytes * _BLOCK_TOKENS), 1)
    tokens = min(num_blocks * _BLOCK_TOKENS, model.config.max_position, _MOST_TOKENS)
    return {"num_slots": num_slots, "max_slot_tokens": tokens}
