"""Settings of Python's garbage collector for processes with thousands of streams, or with steps that take only
milliseconds."""

import gc

_NUM_NEW = 50_000
"""Number of allocations, minus deallocations, that starts a collection of the youngest generation. Python's default is
700. One iteration of a busy event loop allocates more objects than that."""
_NUM_YOUNG, _NUM_MIDDLE = 20, 50


def collect_all() -> None:
    """Collect all garbage, including objects that `collect_rarely` has exempted. Call it after closing a component that
    used much memory."""
    gc.unfreeze()
    gc.collect()


def collect_rarely() -> None:
    """Make garbage collections rare. Collect once, exempt all objects that exist now from later collections, and raise
    the threshold of collections. Nearly all later objects are freed by reference counting. Call it when the process has
    loaded everything that it needs to serve."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_NUM_NEW, _NUM_YOUNG, _NUM_MIDDLE)
