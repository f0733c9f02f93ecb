"""Faults of calls, and plans that select them. A wrapper of a port queries its plan at each call for a fault to inject.
Plans count the selected faults. Pure."""

import enum
import random
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol


class Fault(enum.Enum):
    """A fault that can hit one call."""

    SLOW = "slow"
    """The call is delayed."""
    REFUSE = "refuse"
    """The call does not reach the server; the caller gets an error at once."""
    LOSE = "lose"
    """The server executes the call, at least in part; the caller gets an error instead of the answer."""
    DROP = "drop"
    """No data passes any more, and the connection fails after a delay."""
    TWICE = "twice"
    """The call is delivered to the server twice."""


@dataclass(frozen=True)
class Strike:
    """Fault of one call, with its severity."""

    fault: Fault
    amount: float
    """Severity in [0, 1): scales the delay of the call, or the number of replies before the fault."""


class FaultPlan(Protocol):
    """Selects the fault, if any, of each call of a port. Thread-safe."""

    struck: Counter[tuple[str, Fault]]
    """Number of selected faults, by the call's name and the fault."""

    def next(self, name: str, possible: Collection[Fault]) -> Strike | None:
        """Return the fault of the next call of method `name`, one of `possible`; None for no fault."""
        ...


class SeededPlan:
    """Selects faults for random calls between `begin` and `end`, determined by the seed and each call's name and
    number. Implements FaultPlan."""

    def __init__(self) -> None:
        self.struck: Counter[tuple[str, Fault]] = Counter()
        self._seed = 0
        self._rate = 0.0
        self._calls: Counter[str] = Counter()

    def begin(self, seed: int, rate: float) -> None:
        """Start to select faults, for the fraction `rate` of all calls. Resets the counts."""
        self.struck, self._calls = Counter(), Counter()
        self._seed, self._rate = seed, rate

    def end(self) -> None:
        """Stop selecting faults for later calls."""
        self._rate = 0.0

    def next(self, name: str, possible: Collection[Fault]) -> Strike | None:
        """Return the fault of the next call of method `name`, one of `possible`; None for no fault."""
        if not self._rate:
            return None
        self._calls[name] += 1
        rng = random.Random(f"{self._seed} {name} {self._calls[name]}")
        if rng.random() >= self._rate:
            return None
        strike = Strike(rng.choice(sorted(possible, key=lambda fault: fault.value)), rng.random())
        self.struck[name, strike.fault] += 1
        return strike
