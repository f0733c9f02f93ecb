"""What goes wrong with calls, and when: plans that faulty wrappers of ports ask at every call, and that count what they
did. Pure."""

import enum
import random
from collections import Counter
from collections.abc import Collection
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
    """Hits calls at random, from `begin` to `end`. Whether the n-th call of a name since then is hit, and how, depends
    on the seed alone. Implements FaultPlan."""

    def __init__(self) -> None:
        self.struck: Counter[tuple[str, Fault]] = Counter()
        self._seed = 0
        self._rate = 0.0
        self._calls: Counter[str] = Counter()

    def begin(self, seed: int, rate: float) -> None:
        """From now on this part of all calls is hit."""
        self.struck, self._calls = Counter(), Counter()
        self._seed, self._rate = seed, rate

    def end(self) -> None:
        """No call is hit any more."""
        self._rate = 0.0

    def next(self, name: str, possible: Collection[Fault]) -> Strike | None:
        """As FaultPlan.next."""
        if not self._rate:
            return None
        self._calls[name] += 1
        rng = random.Random(f"{self._seed} {name} {self._calls[name]}")
        if rng.random() >= self._rate:
            return None
        strike = Strike(rng.choice(sorted(possible, key=lambda fault: fault.value)), rng.random())
        self.struck[name, strike.fault] += 1
        return strike
