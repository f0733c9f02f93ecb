"""Settings of Python's garbage collector for processes that hold thousands of streams or run steps of milliseconds."""

import gc

_NUM_NEW = 50_000
"""Net allocations that start a young collection; Python's 700 are less than one turn of a busy loop holds."""
_NUM_YOUNG, _NUM_MIDDLE = 20, 50


def collect_rarely() -> None:
    """Collect once, exempt all objects that are alive now, and make later collections rare: nearly all later objects
    are freed by reference counting. Call it once, when the process has loaded what it serves with; the setting holds
    for the whole process, its libraries included."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_NUM_NEW, _NUM_YOUNG, _NUM_MIDDLE)
