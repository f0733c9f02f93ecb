"""Faults of calls, and the plans that inject them. Wrappers of ports query a plan at every call. Plans count the faults
that they injected. Pure."""

import enum
import random
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol


class Fault(enum.Enum):
    """A fault that can hit one call."""

    SLOW = "slow"
    """The call goes through after a delay."""
    REFUSE = "refuse"
    """The call does not reach the server; the caller gets an error at once."""
    LOSE = "lose"
    """The server does the call, at least in part; the caller gets an error instead of the answer."""
    DROP = "drop"
    """Nothing passes any more; after a while the connection is found dead."""
    TWICE = "twice"
    """The server gets the call twice."""


@dataclass(frozen=True)
class Strike:
    """A fault that hits one call, and how hard."""

    fault: Fault
    amount: float
    """How slow or how late the fault is, in [0, 1)."""


class FaultPlan(Protocol):
    """Decides at each call of a port which fault hits it, if any. Thread-safe."""

    struck: Counter[tuple[str, Fault]]
    """How often each fault has hit each call, by the call's name."""

    def next(self, name: str, possible: Collection[Fault]) -> Strike | None:
        """Return the fault, among the `possible` ones, that hits this call of that name; None for no fault."""
        ...


class SeededPlan:
    """Hits calls at random between `begin` and `end`, each by its name, number and the seed. Implements FaultPlan."""

    def __init__(self) -> None:
        self.struck: Counter[tuple[str, Fault]] = Counter()
        self._seed = 0
        self._rate = 0.0
        self._calls: Counter[str] = Counter()

    def begin(self, seed: int, rate: float) -> None:
        """Start to hit calls: the fraction `rate` of all calls from now on. Resets the counts."""
        self.struck, self._calls = Counter(), Counter()
        self._seed, self._rate = seed, rate

    def end(self) -> None:
        """Stop hitting calls from now on."""
        self._rate = 0.0

    def next(self, name: str, possible: Collection[Fault]) -> Strike | None:
        """Return the fault, among the `possible` ones, that hits this call of that name; None for no fault."""
        if not self._rate:
            return None
        self._calls[name] += 1
        rng = random.Random(f"{self._seed} {name} {self._calls[name]}")
        if rng.random() >= self._rate:
            return None
        strike = Strike(rng.choice(sorted(possible, key=lambda fault: fault.value)), rng.random())
        self.struck[name, strike.fault] += 1
        return strike
