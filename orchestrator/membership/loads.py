"""How much work this orchestrator has given each group. Kept by `orchestrator.membership.members`. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Load:
    """The work that this orchestrator has given a group."""

    num_requests: int = 0
    num_slots: int = 0
    """Slots that the group's requests hold, or are about to hold."""
