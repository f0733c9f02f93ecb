"""Launches of Triton kernels, and helpers that check whether Triton is installed and whether its interpreter runs.

All kernels are launched by `launch`. Tests and benchmarks can watch the launches, or replace them (`launching_by`).
"""

import functools
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from baton.errors import ConfigError

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes that the kernels support. All tensors of a call have the same dtype."""


@functools.cache
def has_triton() -> bool:
    """Return True if Triton is installed."""
    return importlib.util.find_spec("triton") is not None


def compiles_for(device: torch.device, dtype: torch.dtype) -> bool:
    """Return True if Triton is installed and can compile kernels for tensors of this device and dtype. The device must
    be a GPU."""
    return device.type == "cuda" and dtype in DTYPES and has_triton()


@functools.cache
def shared_bytes_of(device: torch.device) -> int | None:
    """Return the number of bytes of shared memory that a program (thread block) may use on the GPU `device`. None if
    the device is not a GPU."""
    if device.type != "cuda":
        return None
    from triton.runtime import driver

    return int(driver.active.utils.get_device_properties(device.index)["max_shared_mem"])


def num_compiled(device: torch.device) -> int:
    """Return the number of Triton kernels that this process has compiled since the first call of this function. Kernels
    that are loaded from Triton's cache on the disk count too. 0 if the device is not a GPU, or Triton is not
    installed."""
    return len(_compilations()) if device.type == "cuda" and has_triton() else 0


@functools.cache
def _compilations() -> list[str]:
    """Return a list to which Triton's hook appends a description of each kernel that is compiled from now on."""
    import triton

    seen: list[str] = []
    triton.knobs.runtime.jit_post_compile_hook = lambda **details: seen.append(details["repr"])
    return seen


def require_triton() -> None:
    """Import Triton. Raises ConfigError if it is not installed."""
    try:
        import triton  # noqa: F401
    except ModuleNotFoundError as error:
        raise ConfigError("kernels for CUDA need Triton: run `pip install 'baton-serve[cuda]'`") from error


def check(holds: bool, text: str) -> None:
    """Raise RuntimeError with `text` unless `holds` is True."""
    if not holds:
        raise RuntimeError(text)


def is_interpreted(kernel: Any) -> bool:
    """Return True if Triton's interpreter runs the kernel. This is the case if TRITON_INTERPRET=1 was set when the
    kernel was imported."""
    import triton

    return not isinstance(kernel, triton.runtime.JITFunction)


def widens(kernel: Any, dtype: torch.dtype) -> bool:
    """Return True if the kernel must convert operands of matrix products to fp32. This is necessary for bf16 in the
    interpreter, which cannot multiply bf16. The operands have already been rounded to bf16, so the products are the
    same."""
    return dtype == torch.bfloat16 and is_interpreted(kernel)


Launcher = Callable[[Any, tuple[int, ...], tuple[Any, ...], dict[str, Any]], None]
"""Function (kernel, grid, arguments, options) that launches a kernel."""


def run_kernel(kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Launch a kernel on the present device. The default Launcher."""
    kernel[grid](*arguments, **options)


_launchers: list[Launcher] = [run_kernel]
"""Launchers. The last one is used."""


def launch(device: torch.device, kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Launch a kernel on `device` with the given arguments and compile options. Does not wait for the device. The
    kernel is compiled first unless it was compiled for such arguments before (see `baton.modeling.kernels.triton`).
    Raises RuntimeError if the device is a CPU, and the kernel is neither interpreted nor launched by a Launcher that
    replaces the default."""
    run = _launchers[-1]
    if device.type == "cuda":
        with torch.cuda.device(device):
            run(kernel, grid, arguments, options)
        return
    text = f"Triton compiles for GPUs, and the tensors are on {device.type}: use the kernels in C++"
    check(device.type != "cpu" or is_interpreted(kernel) or run is not run_kernel, text)
    run(kernel, grid, arguments, options)


@contextmanager
def launching_by(launcher: Launcher) -> Iterator[None]:
    """Inside the `with` block, let `launcher` launch all kernels of this process."""
    _launchers.append(launcher)
    try:
        yield
    finally:
        _launchers.pop()
