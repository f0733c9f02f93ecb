"""Counters of Triton launches and of torch's operations, and records of what Triton would compile.

Triton compiles a kernel anew for each *specialization key*: dtypes, compile-time values, and properties of the values
of arguments, such as divisibility by 16. The key is computed without compiling and without a GPU. Use the launchers
only in a separate process, because they register a fake GPU with Triton until the process ends.
"""

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from torch.utils._python_dispatch import TorchDispatchMode

from baton.modeling.forward import linear, norms, rope, sampling
from baton.modeling.kernels.triton.launch import is_interpreted, run_kernel
from tests.support.kernels.triton.compiling import AbsentGpu


class Recorder:
    """Launcher that records the specialization keys of all launches. It runs the kernels only if `runs` is set, which
    requires Triton's interpreter."""

    def __init__(self, *, runs: bool) -> None:
        self._runs = runs
        self.keys = set[str]()
        self.num_launches = 0

    def __call__(self, kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        self.keys.add(key_of(kernel, arguments, options))
        self.num_launches += 1
        if self._runs:
            run_kernel(kernel, grid, arguments, options)


def key_of(kernel: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> str:
    """Return the specialization key of a launch as text that begins with the kernel's name."""
    binder = _binder(kernel)
    _, specialization, others = binder(*arguments, **options)
    return f"{kernel.__name__} {specialization} {sorted(others.items())}"


@functools.cache
def _binder(kernel: Any) -> Any:
    from triton.runtime import JITFunction
    from triton.runtime.driver import driver

    driver.set_active(AbsentGpu())
    compiled = JITFunction(kernel.fn, **kernel.kwargs) if is_interpreted(kernel) else kernel
    *_, binder = compiled.device_caches[0]
    return binder


class CountedOps(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside the `with` block, counts torch's operations that compute or copy. Views and allocations are not
    counted."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        is_view = any(each.alias_info is not None and not each.alias_info.is_write for each in func._schema.returns)
        if not is_view and not any(each in name for each in ("empty", "_unsafe_view", "detach")):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Inside the `with` block, let norms, gates, RoPE and sampling on the CPU use Triton's kernels, as on a
    GPU. Attention uses
    them on a decoder of `tests.support.kernels.triton.step_engines.decoder_on`."""
    with ExitStack() as entered:
        for module in (linear, norms, rope, sampling):
            entered.enter_context(patch.object(module, "compiles_for", lambda device, dtype: True))
        yield
