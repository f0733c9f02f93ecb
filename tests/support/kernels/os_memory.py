"""Memory use of this process as reported by the operating system, and its garbage collection."""

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from baton.modeling.kv.row_memory import PAGE_BYTES, PagedMemory

_ENTRY_BYTES = 8
_PRESENT = np.uint64(1 << 63 | 1 << 62)
"""Bits of a page's entry in /proc/self/pagemap: the page is in memory or swapped out."""


def resident_bytes(memory: PagedMemory) -> int:
    """Return the number of bytes of the memory's address space that are backed by pages."""
    first = memory.address // PAGE_BYTES
    num_pages = memory.data_LS2GH.stride(0) * memory.data_LS2GH.element_size() * len(memory.data_LS2GH) // PAGE_BYTES
    with Path("/proc/self/pagemap").open("rb") as pagemap:
        pagemap.seek(first * _ENTRY_BYTES)
        entries = np.frombuffer(pagemap.read(num_pages * _ENTRY_BYTES), np.uint64)
    return int(np.count_nonzero(entries & _PRESENT)) * PAGE_BYTES


@contextmanager
def without_collections() -> Iterator[None]:
    """Let nothing collect garbage inside the context. A collection visits the objects of all earlier tests of the
    process, which takes up to 0.6 s."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def process_bytes() -> int:
    """Return the resident memory of this process in bytes, after releasing memory that Python and malloc only cache."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES


def reset_peak() -> None:
    """Reset the peak, so that `peak_bytes` counts from now."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    """Return the maximum resident memory of this process in bytes since `reset_peak`."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmHWM"].split()[0]) * 1024
