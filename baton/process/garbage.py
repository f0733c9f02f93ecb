"""Settings of Python's garbage collector for processes that hold thousands of streams or run steps of milliseconds."""

import gc

_NUM_NEW = 50_000
"""Net allocations that start a young collection; Python's 700 are less than one turn of a busy loop holds."""
_NUM_YOUNG, _NUM_MIDDLE = 20, 50


def collect_all() -> None:
    """Collect all garbage, also among the objects that `collect_rarely` has exempted. Call when a part of the process
    has ended that held much memory."""
    gc.unfreeze()
    gc.collect()


def collect_rarely() -> None:
    """Collect once, exempt all objects that are alive now, and make later collections rare: nearly all later objects
    are freed by reference counting. Call when the process has loaded all that it serves with."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_NUM_NEW, _NUM_YOUNG, _NUM_MIDDLE)
