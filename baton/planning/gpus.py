"""Nominal rates of known GPUs, and the rates that Baton's kernels reach on them.

The rates of data sheets are multiplied by fractions that were fitted to measurements on an H100 and an H200
(`benchmarks/results`). They are used for predictions until a profile of the GPU has been measured. All functions are
pure.
"""

import re
from dataclasses import dataclass

from baton.planning.cost_model import LinkModel
from baton.planning.hardware import Hardware


@dataclass(frozen=True)
class Gpu:
    """Rates of a kind of GPU, from its data sheet."""

    name: str
    bf16_flops: float
    """FLOP/s of dense bf16 matrix products."""
    fp32_flops: float
    memory_bandwidth: float
    """Bytes of device memory that are read per second."""


_KNOWN = (
    Gpu("GB200", 2.5e15, 8e13, 8e12),
    Gpu("GH200", 9.89e14, 6.7e13, 4e12),
    Gpu("B200", 2.25e15, 7.5e13, 8e12),
    Gpu("H200", 9.89e14, 6.7e13, 4.8e12),
    Gpu("H100 PCIe", 7.56e14, 5.1e13, 2e12),
    Gpu("H100 NVL", 8.35e14, 6e13, 3.9e12),
    Gpu("H100", 9.89e14, 6.7e13, 3.35e12),
    Gpu("A100-SXM4-80GB", 3.12e14, 1.95e13, 2.039e12),
    Gpu("A100 80GB PCIe", 3.12e14, 1.95e13, 1.935e12),
    Gpu("A100", 3.12e14, 1.95e13, 1.555e12),
    Gpu("L40S", 3.62e14, 9.16e13, 8.64e11),
    Gpu("L40", 1.81e14, 9.05e13, 8.64e11),
    Gpu("L4", 1.21e14, 3.03e13, 3e11),
    Gpu("A10G", 7e13, 3.1e13, 6e11),
    Gpu("A10", 1.25e14, 3.12e13, 6e11),
    Gpu("RTX 4090", 1.65e14, 8.26e13, 1.008e12),
)
"""Known GPUs. A name that contains another one comes first."""
ASSUMED = next(gpu for gpu in _KNOWN if gpu.name == "L4")
"""GPU whose rates are assumed for a GPU that is not known."""

_PRODUCT_SHARE = 0.71
"""Fraction of a GPU's FLOP/s that matrix products reach, with 2,048 tokens and the layers of a 7B model."""
_ATTENTION_SHARE = 0.39
"""Fraction of a GPU's FLOP/s that the prefill attention kernel reaches."""
_MEMORY_SHARE = 0.83
"""Fraction of a GPU's memory bandwidth that decode steps reach, in addition to the fixed time of each layer."""
_LAYER_S = 30e-6
"""Seconds of a layer in addition to its products and its attention, in steps that replay a CUDA graph."""
_LAUNCH_S = 0.5e-3
"""Minimum time in seconds of a layer whose kernels are launched one by one."""
_LINK = LinkModel(1e-4, 3.9e9)
"""Link between workers. KV passes through host memory, where one thread copies it and computes its checksums."""


def gpu_of(name: str) -> Gpu | None:
    """Return the known GPU whose name is a part of `name`, the name that the driver reports; None if no known GPU
    matches. The part must not continue a word or a number."""
    return next((gpu for gpu in _KNOWN if re.search(rf"(?<!\w){gpu.name}(?!\w)", name, re.IGNORECASE)), None)


def gpu_rank(name: str, dtype_bytes: int) -> Hardware:
    """Return the rates of a rank on the GPU with this name; empty or unknown: those of `ASSUMED`. `dtype_bytes` is 2
    for bf16 and 4 for fp32."""
    gpu = gpu_of(name) or ASSUMED
    flops = gpu.bf16_flops if dtype_bytes == 2 else gpu.fp32_flops
    return Hardware(
        linear_flops=_PRODUCT_SHARE * flops,
        pair_flops=_ATTENTION_SHARE * flops,
        link=_LINK,
        memory_bandwidth=_MEMORY_SHARE * gpu.memory_bandwidth,
        fixed_s=_LAYER_S,
        issue_s=_LAUNCH_S,
    )
