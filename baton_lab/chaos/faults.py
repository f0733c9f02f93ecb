"""Faults of calls, and plans that decide which calls get a fault. Code that wraps an interface calls `FaultPlan.next`
at each call. The plan returns the fault to inject, if any, and counts the faults. Does no I/O."""

import enum
import random
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol


class Fault(enum.Enum):
    """Kind of fault that can be injected into a call."""

    SLOW = "slow"
    """The call is delayed."""
    REFUSE = "refuse"
    """The call does not reach the server; the caller gets an error at once."""
    LOSE = "lose"
    """The server executes the call, at least in part. The caller gets an error instead of the answer."""
    DROP = "drop"
    """The connection stops passing data, and fails after a delay."""
    TWICE = "twice"
    """The call is delivered to the server twice."""


@dataclass(frozen=True)
class Strike:
    """Fault selected for one call, and its severity."""

    fault: Fault
    amount: float
    """Severity in [0, 1). It scales the delay of the call, or the number of replies that pass before the fault."""


class FaultPlan(Protocol):
    """Interface that decides which fault, if any, each call gets. Thread-safe."""

    struck: Counter[tuple[str, Fault]]
    """Number of faults selected so far, by (name of the called method, fault)."""

    def next(self, name: str, possible: Collection[Fault]) -> Strike | None:
        """Return the fault to inject into the next call of the method `name`; None for no fault. The fault is one of
        `possible`."""
        ...


class SeededPlan:
    """Plan that selects faults for random calls between `begin` and `end`. Calls are numbered separately for each
    method name. The seed, the name and the number determine whether a call gets a fault, and which one. Implements
    FaultPlan."""

    def __init__(self) -> None:
        self.struck: Counter[tuple[str, Fault]] = Counter()
        self._seed = 0
        self._rate = 0.0
        self._calls: Counter[str] = Counter()

    def begin(self, seed: int, rate: float) -> None:
        """Start selecting faults for the fraction `rate` of all calls, in [0, 1]. Resets the counts of selected
        faults."""
        self.struck, self._calls = Counter(), Counter()
        self._seed, self._rate = seed, rate

    def end(self) -> None:
        """Stop selecting faults. Later calls get none."""
        self._rate = 0.0

    def next(self, name: str, possible: Collection[Fault]) -> Strike | None:
        """Return the fault to inject into the next call of the method `name`; None for no fault. The fault is one of
        `possible`."""
        if not self._rate:
            return None
        self._calls[name] += 1
        rng = random.Random(f"{self._seed} {name} {self._calls[name]}")
        if rng.random() >= self._rate:
            return None
        strike = Strike(rng.choice(sorted(possible, key=lambda fault: fault.value)), rng.random())
        self.struck[name, strike.fault] += 1
        return strike
