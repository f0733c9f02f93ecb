"""Identifiers as distinct types, so that a slot is never mistaken for a stamp."""

from typing import NewType

RequestId = NewType("RequestId", str)
"""Names a client's request for its whole life, over all attempts."""

JobId = NewType("JobId", int)
"""Names one attempt at prefilling one request: a number that the group's sequencer gives out, ascending."""

StreamNumber = NewType("StreamNumber", int)
"""Names one stream that an orchestrator opens at a generation group; unique over all lives of the orchestrator."""

ReserveNumber = NewType("ReserveNumber", int)
"""Names one Reserve call over all lives of an orchestrator, so that it can be undone if its answer is lost."""

SlotId = NewType("SlotId", int)
"""Names a slot: a row of a generation group's batch."""

Stamp = NewType("Stamp", int)
"""A slot's generation: grows with every lease of that slot, so that a late writer can be told apart."""

Epoch = NewType("Epoch", int)
"""Numbers the lives of a prefill group's links."""

MAX_EPOCH = Epoch(2**48 - 1)
"""The highest epoch that a rank joins: far beyond what links ever reach, and well within the field's 64 bits."""

Rank = NewType("Rank", int)
"""A worker's place in its group, from 0."""
