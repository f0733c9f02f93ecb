"""Python's garbage collector, in processes that carry thousands of streams, or have some milliseconds for a step."""

import gc

_NUM_NEW = 50_000
"""Objects made and not yet gone, at which the young ones are looked through. Python's own 700 is less than a turn of a
busy loop holds."""
_NUM_YOUNG, _NUM_MIDDLE = 20, 50


def collect_rarely() -> None:
    """What lives now is never looked at again, and what comes is looked through more rarely: nearly all of it goes by
    itself. Once, when a process has loaded what it serves with; what its libraries set goes for all of it."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_NUM_NEW, _NUM_YOUNG, _NUM_MIDDLE)
