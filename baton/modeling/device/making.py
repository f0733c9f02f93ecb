"""Creates devices by name. `baton.modeling.hosting` creates one device per worker process."""

import torch

from baton.errors import ConfigError
from baton.modeling.device.copying import UNBOUND, LinkRate
from baton.modeling.device.cpu import CpuDevice
from baton.modeling.device.cuda import CudaDevice
from baton.modeling.device.emulated import EmulatedDevice
from baton.modeling.device.port import Device


def make_device(name: str, rate: LinkRate = UNBOUND) -> Device:
    """Create a device. `name` is cpu, cuda, emulated, or auto, which means cpu. `rate` applies to the link of an
    emulated device only. Raises ConfigError if the name is unknown or the device is not available."""
    if name in ("auto", "cpu"):
        return CpuDevice()
    if name == "emulated":
        return EmulatedDevice(rate)
    if name == "cuda":
        require_cuda()
        return CudaDevice()
    raise ConfigError(f"device = {name!r} is unknown: use auto, cpu, cuda or emulated")


def require_cuda() -> None:
    """Raise ConfigError if torch finds no CUDA device. The message contains the reason."""
    if torch.version.cuda is None:
        raise ConfigError(
            "device = cuda is not available: this torch is built without CUDA; install one with, or use cpu"
        )
    if not torch.cuda.is_available():
        raise ConfigError("device = cuda is not available: torch sees no GPU; see nvidia-smi, or use cpu")
