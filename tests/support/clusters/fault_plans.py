"""Fault plan whose faults a test selects."""

from collections import Counter
from collections.abc import Collection, Mapping

from baton_lab.chaos.faults import Fault, Strike


class PickedPlan:
    """Plan that strikes only the first call of each selected name. Implements FaultPlan."""

    def __init__(self, faults: Mapping[str, Fault], amount: float) -> None:
        self.struck: Counter[tuple[str, Fault]] = Counter()
        self.is_on = False
        """True while the plan is active. An inactive plan strikes no call."""
        self._due = dict(faults)
        self._amount = amount

    def next(self, name: str, possible: Collection[Fault]) -> Strike | None:
        if not self.is_on or name not in self._due:
            return None
        fault = self._due.pop(name)
        assert fault in possible, f"{name} knows no {fault.value}"
        self.struck[name, fault] += 1
        return Strike(fault, self._amount)
