"""Rates of hardware by name: accelerators with the rates of data sheets, and prefill ranks with achieved rates."""

from typing import TYPE_CHECKING

from baton.errors import ConfigError
from baton.planning.chips import Chip
from baton.planning.cost_model import LinkModel
from baton.planning.hardware import CPU_CORE, CPU_CORE_FP32, Hardware

if TYPE_CHECKING:
    from baton.planning.device_profile import DeviceProfile

CHIPS = {
    "tpu-v5e": Chip(flops=1.97e14, memory_bandwidth=8.2e11, memory_bytes=16e9),
    "a100": Chip(flops=3.12e14, memory_bandwidth=2.039e12, memory_bytes=80e9),
    "h100": Chip(flops=9.894e14, memory_bandwidth=3.35e12, memory_bytes=80e9),
    "h200": Chip(flops=9.894e14, memory_bandwidth=4.8e12, memory_bytes=141e9),
}
"""Accelerators by name, with dense bf16 rates. The values of A100 80 GB, H100 SXM and H200 SXM are from data sheets.
The values of TPU v5e are from the book "How To Scale Your Model"."""


def chip_of(name: str) -> Chip:
    """Return the accelerator called `name`; the case of letters is ignored. Raises ConfigError for an unknown name."""
    if name.lower() not in CHIPS:
        raise ConfigError(f"hardware = {name!r} is unknown: use one of {', '.join(CHIPS)}, or here for this machine")
    return CHIPS[name.lower()]


HARDWARE = {
    # Fitted by benchmarks.simulate_paper to the paper's one-GPU row: attention that stores its scores, NVLink.
    "a100-eager": Hardware(
        linear_flops=1.6988e14,
        pair_flops=1.56e14,
        link=LinkModel(9.738e-5, 300e9),
        scores_per_s=5.1496e10,
        memory_bandwidth=1.555e12,
        fixed_s=3.215e-5,
        issue_s=2.925e-3,
    ),
    # Assumed, not measured: 40 % of an H100's dense bf16 peak for matrices and attention, and a 400 Gbit/s network.
    "h100-flash": Hardware(4e14, 4e14, LinkModel(15e-6, 50e9), memory_bandwidth=3.35e12),
    "cpu-core": CPU_CORE,
    "cpu-core-fp32": CPU_CORE_FP32,
}
"""Rates of a prefill rank's hardware by name, for estimates. The rates of a machine are measured by `baton calibrate`
(`deploy.machine.device_profile`)."""


HERE = "here"
"""Name of this machine's hardware."""


def hardware_of(name: str, dtype_bytes: int = 2) -> Hardware:
    """Return the rates of a rank's hardware by its name in HARDWARE. HERE: the rates of this machine's first GPU or, if
    it has none, of one core, for values of `dtype_bytes` bytes. They are nominal unless they were measured. Raises
    ConfigError for an unknown name."""
    if name == HERE:
        return _profile_here(dtype_bytes).hardware
    if name not in HARDWARE:
        raise ConfigError(f"hardware = {name!r} is unknown: use one of {', '.join(HARDWARE)}, or here for this machine")
    return HARDWARE[name]


def hardware_title(name: str, dtype_bytes: int = 2) -> str:
    """Return the name of the hardware that `hardware_of` returns for the same arguments. For HERE, the text also says
    whether the rates were measured."""
    return f"{name} ({basis(_profile_here(dtype_bytes).is_measured)})" if name == HERE else name


def basis(is_measured: bool) -> str:
    """Return a text that says whether the rates of this machine were measured."""
    return "measured rates" if is_measured else "nominal rates: `baton calibrate` measures them"


def _profile_here(dtype_bytes: int) -> "DeviceProfile":
    from deploy.machine.device_profile import cpu_profile, gpu_profile
    from deploy.machine.this_machine import gpu_name

    gpu = gpu_name()
    return gpu_profile(gpu, dtype_bytes) if gpu else cpu_profile(1, dtype_bytes)
