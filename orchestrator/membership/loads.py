"""Counts the requests and slots that this orchestrator has assigned to each group. Maintained by
`orchestrator.membership.members`. Does no I/O."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Load:
    """Number of requests and slots that this orchestrator has assigned to a group."""

    num_requests: int = 0
    num_slots: int = 0
    """Number of slots that the group's requests have leased or are about to lease."""
