"""How much work this orchestrator has given each group. Kept by `orchestrator.membership.members`. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Load:
    """The work that this orchestrator has given a group."""

    num_requests: int = 0
    num_slots: int = 0
    """Slots that the group's requests hold, or are about to hold."""


class Loads:
    """The loads of all groups that have any, by name."""

    def __init__(self) -> None:
        self._loads: dict[str, Load] = {}

    @property
    def has_any(self) -> bool:
        """Return whether any group has been given work that it has not done."""
        return bool(self._loads)

    def of(self, name: str) -> Load:
        """Return the load of the group of that name."""
        return self._loads.get(name, Load())

    def add(self, name: str, num_requests: int, num_slots: int) -> None:
        """Add to a group's load; negative numbers take away from it."""
        load = self.of(name)
        load = Load(load.num_requests + num_requests, load.num_slots + num_slots)
        self._loads[name] = load
        if not load.num_requests:
            del self._loads[name]
