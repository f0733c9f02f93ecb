"""Identifiers as distinct types, so that a slot is never mistaken for a stamp."""

from typing import NewType

RequestId = NewType("RequestId", str)
"""A client's request, for its whole life, over all attempts."""

JobId = NewType("JobId", int)
"""One attempt at prefilling one request: the number that the group's sequencer gave it, ascending."""

StreamNumber = NewType("StreamNumber", int)
"""One claim of an orchestrator to a generation group's stream, unique over all its lives."""

ReserveNumber = NewType("ReserveNumber", int)
"""One Reserve of an orchestrator, unique over all its lives, by which it can be undone when its answer was lost."""

SlotId = NewType("SlotId", int)
"""A row of a generation group's batch."""

Stamp = NewType("Stamp", int)
"""A slot's generation: grows with every lease of that slot, so that a late writer can be told apart."""

Epoch = NewType("Epoch", int)
"""One life of a prefill group's links."""

MAX_EPOCH = Epoch(2**48 - 1)
"""The highest epoch that a rank joins: far beyond what links ever reach, and well within the field's 64 bits."""

Rank = NewType("Rank", int)
"""A place in a group."""
