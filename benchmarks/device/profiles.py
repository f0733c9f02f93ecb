"""Observes an engine under load: samples the engine thread's stack, traces GPU kernels, and records compilations by
Triton."""

import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.device.served import ENGINE_THREAD

ROOT = Path(__file__).parents[2]
_SAMPLE_S = 0.002


class Compilation(NamedTuple):
    """A Triton kernel that was compiled, or loaded from Triton's cache, during a load."""

    kernel: str
    at_s: float
    """Time at which the kernel was compiled, or loaded from the cache, in seconds of `time.perf_counter`."""
    took_s: float
    was_cached: bool
    """True if the kernel was loaded from Triton's cache."""


@contextmanager
def compilations() -> Iterator[list[Compilation]]:
    """Context manager. Yield a list to which every compilation by Triton is appended until the block ends, in any
    thread."""
    import triton.knobs

    found = list[Compilation]()

    def note(*, metadata: dict[str, Any], times: Any, cache_hit: bool, **_: Any) -> None:
        found.append(Compilation(str(metadata["name"]), time.perf_counter(), times.total / 1e6, cache_hit))

    before, triton.knobs.compilation.listener = triton.knobs.compilation.listener, note
    try:
        yield found
    finally:
        triton.knobs.compilation.listener = before


def engine_stacks(seconds: float) -> Counter[str]:
    """Sample the stack of the engine's thread every two milliseconds for `seconds` seconds. Return, for each function
    of Baton, the number of samples in which it was the innermost Baton function on the stack. Blocks."""
    ident = next(each.ident for each in threading.enumerate() if each.name == ENGINE_THREAD)
    counts, pause, over_s = Counter[str](), threading.Event(), time.perf_counter() + seconds
    while time.perf_counter() < over_s:
        frame = sys._current_frames().get(ident or 0)
        while frame is not None and not frame.f_code.co_filename.startswith(str(ROOT)):
            frame = frame.f_back
        if frame is not None:
            counts[f"{Path(frame.f_code.co_filename).relative_to(ROOT)}:{frame.f_code.co_qualname}"] += 1
        pause.wait(_SAMPLE_S)
    return counts


def gpu_kernels(seconds: float, trace: Path | None) -> dict[str, float]:
    """Trace the GPU for `seconds` seconds. Return the total seconds of each kernel and each kind of copy by name,
    longest first. If `trace` is given, write a Chrome trace to it. Blocks."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        threading.Event().wait(seconds)
        torch.cuda.synchronize()
    if trace is not None:
        profiled.export_chrome_trace(str(trace))
    found = {each.key: each.self_device_time_total / 1e6 for each in profiled.key_averages()}
    return dict(sorted(found.items(), key=lambda each: -each[1]))
