"""Helpers for launches of Triton kernels: whether Triton is installed, whether its interpreter runs, and the device."""

import functools
import importlib.util
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from baton.errors import ConfigError

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes that the kernels support. All tensors of a call have the same dtype."""


@functools.cache
def has_triton() -> bool:
    """Return whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


def compiles_for(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether Triton is installed and compiles kernels for tensors of that device, a GPU, and dtype."""
    return device.type == "cuda" and dtype in DTYPES and has_triton()


@functools.cache
def shared_bytes_of(device: torch.device) -> int | None:
    """Return the bytes of shared memory that a program may use on the GPU `device`. None for other devices."""
    if device.type != "cuda":
        return None
    from triton.runtime import driver

    return int(driver.active.utils.get_device_properties(device.index)["max_shared_mem"])


def require_triton() -> None:
    """Import Triton. Raises ConfigError if it is not installed."""
    try:
        import triton  # noqa: F401
    except ModuleNotFoundError as error:
        raise ConfigError("kernels for CUDA need Triton: run `pip install 'baton-serve[cuda]'`") from error


def check(holds: bool, text: str) -> None:
    """Raise RuntimeError with `text`, as the operators in C++ do, unless the condition holds."""
    if not holds:
        raise RuntimeError(text)


def is_interpreted(kernel: Any) -> bool:
    """Return whether Triton's interpreter runs the kernel, because TRITON_INTERPRET=1 was set when the kernel was
    imported."""
    import triton

    return not isinstance(kernel, triton.runtime.JITFunction)


def widens(kernel: Any, dtype: torch.dtype) -> bool:
    """Return whether the kernel must widen operands of products to fp32, because the interpreter cannot multiply bf16.
    The operands are rounded to bf16 before, so that the products are the same."""
    return dtype == torch.bfloat16 and is_interpreted(kernel)


def on(device: torch.device, kernel: Any) -> AbstractContextManager[Any]:
    """Return a context in which a kernel is launched on a device. Raises RuntimeError for a CPU, unless the interpreter
    runs the kernel."""
    if device.type == "cuda":
        return torch.cuda.device(device)
    text = f"Triton compiles for GPUs, and the tensors are on {device.type}: use the kernels in C++"
    check(device.type != "cpu" or is_interpreted(kernel), text)
    return nullcontext()
