"""What goes wrong, and when: plans that faulty wrappers of ports ask at every call, and that count what they did."""

import enum
import random
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol


class Fault(enum.Enum):
    """What happens to one call."""

    SLOW = "slow"
    """It goes through, and takes its time."""
    REFUSE = "refuse"
    """Nobody hears it; the caller gets an error at once."""
    LOSE = "lose"
    """It is heard, and done at least in part; the caller gets an error instead of the answer."""
    DROP = "drop"
    """Nothing passes any more; after a while the connection is found dead."""
    TWICE = "twice"
    """It is heard twice."""


@dataclass(frozen=True)
class Strike:
    """A fault that hits a call."""

    fault: Fault
    amount: float
    """In [0, 1): how slow, or how late."""


class FaultPlan(Protocol):
    """Decides at each call of a port. Thread-safe."""

    struck: Counter[tuple[str, Fault]]
    """How often each fault has hit each call."""

    def next(self, name: str, possible: Collection[Fault]) -> Strike | None:
        """What happens to this call of that name; None: nothing."""
        ...


class SeededPlan:
    """Hits calls at random. Whether the n-th call of a name is hit, and how, depends on the seed alone."""

    def __init__(self, seed: int, rate: float) -> None:
        """`rate`: the part of all calls that is hit."""
        self.struck: Counter[tuple[str, Fault]] = Counter()
        self.is_on = False
        """Whether calls are hit at all."""
        self._seed = seed
        self._rate = rate
        self._calls: Counter[str] = Counter()

    def next(self, name: str, possible: Collection[Fault]) -> Strike | None:
        if not self.is_on:
            return None
        self._calls[name] += 1
        rng = random.Random(f"{self._seed} {name} {self._calls[name]}")
        if rng.random() >= self._rate:
            return None
        strike = Strike(rng.choice(sorted(possible, key=lambda fault: fault.value)), rng.random())
        self.struck[name, strike.fault] += 1
        return strike


class PickedPlan:
    """Hits the first call of each of some names, and nothing else."""

    def __init__(self, faults: Mapping[str, Fault], amount: float) -> None:
        self.struck: Counter[tuple[str, Fault]] = Counter()
        self.is_on = False
        """Whether calls are hit at all."""
        self._due = dict(faults)
        self._amount = amount

    def next(self, name: str, possible: Collection[Fault]) -> Strike | None:
        if not self.is_on or name not in self._due:
            return None
        fault = self._due.pop(name)
        assert fault in possible, f"{name} knows no {fault.value}"
        self.struck[name, fault] += 1
        return Strike(fault, self._amount)
