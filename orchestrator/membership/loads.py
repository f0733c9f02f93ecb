"""Amount of work that this orchestrator has given each group. Maintained by `orchestrator.membership.members`. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Load:
    """Amount of work that this orchestrator has given a group."""

    num_requests: int = 0
    num_slots: int = 0
    """Number of slots that the group's requests hold or are about to hold."""
