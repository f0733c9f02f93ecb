"""What the operating system says about this process's memory."""

import ctypes
import gc
from pathlib import Path

import numpy as np

from baton.modeling.kv.row_memory import PAGE_BYTES, PagedMemory

_ENTRY_BYTES = 8
_PRESENT = np.uint64(1 << 63 | 1 << 62)
"""In memory or swapped out: of a page's entry in /proc/self/pagemap."""


def resident_bytes(memory: PagedMemory) -> int:
    """Bytes of its address space that have pages."""
    first = memory.address // PAGE_BYTES
    num_pages = memory.data_LS2GH.stride(0) * memory.data_LS2GH.element_size() * len(memory.data_LS2GH) // PAGE_BYTES
    with Path("/proc/self/pagemap").open("rb") as pagemap:
        pagemap.seek(first * _ENTRY_BYTES)
        entries = np.frombuffer(pagemap.read(num_pages * _ENTRY_BYTES), np.uint64)
    return int(np.count_nonzero(entries & _PRESENT)) * PAGE_BYTES


def process_bytes() -> int:
    """Resident memory of this process, less what Python and malloc only keep for later."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES


def reset_peak() -> None:
    """Makes `peak_bytes` count from now."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    """The most memory that this process has had resident since `reset_peak`."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmHWM"].split()[0]) * 1024
