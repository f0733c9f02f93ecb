"""Identifiers as distinct types, so that a slot is never mistaken for a stamp."""

from typing import NewType

RequestId = NewType("RequestId", str)
"""Id of a client's request, the same for all of its attempts."""

JobId = NewType("JobId", int)
"""Number of one attempt at prefilling one request, assigned in ascending order by the group's sequencer."""

StreamNumber = NewType("StreamNumber", int)
"""Number of one stream that an orchestrator opens at a generation group; unique across the orchestrator's restarts."""

ReserveNumber = NewType("ReserveNumber", int)
"""Number of one Reserve call, unique across the orchestrator's restarts. A call without an answer is undone by it."""

SlotId = NewType("SlotId", int)
"""Id of a slot: the place of one sequence in a generation group's batch."""

Stamp = NewType("Stamp", int)
"""Generation of a slot, raised by every lease of that slot, so that a late writer is recognised."""

Epoch = NewType("Epoch", int)
"""Number of one incarnation of a prefill group's links."""

MAX_EPOCH = Epoch(2**48 - 1)
"""The highest epoch that a rank joins: far beyond what links ever reach, and well within the field's 64 bits."""

Rank = NewType("Rank", int)
"""A worker's place in its group, from 0."""
