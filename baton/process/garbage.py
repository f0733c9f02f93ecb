"""Settings of Python's garbage collector for processes that hold thousands of streams, or whose steps take only
milliseconds."""

import gc

_NUM_NEW = 50_000
"""Number of net allocations that start a collection of the youngest generation. Python's default of 700 is less than
one iteration of a busy event loop allocates."""
_NUM_YOUNG, _NUM_MIDDLE = 20, 50


def collect_all() -> None:
    """Collect all garbage, including the objects that `collect_rarely` has exempted. Call it after a component that
    held much memory was closed."""
    gc.unfreeze()
    gc.collect()


def collect_rarely() -> None:
    """Collect once, exempt all living objects from later collections, and make these rare. Nearly all later objects are
    freed by reference counting. Call it once the process has loaded everything that it needs to serve."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_NUM_NEW, _NUM_YOUNG, _NUM_MIDDLE)
