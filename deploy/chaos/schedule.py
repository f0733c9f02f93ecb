"""Schedules of chaos: what is asked, what is struck down and when, and how bad the network is; all of it a pure
function of a seed.

Blows fall after numbers of tokens, counted over all streams, and clients leave after numbers of events: a schedule does
the same on a fast machine and on a slow one. Pure.
"""

import enum
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from baton.sampling_params import SamplingParams

ORCHESTRATOR = "orchestrator"
_PAUSE_S = 0.4
"""Until a client leaves after the event at which it decides to, at most: so that it leaves in any phase."""
_NUM_STEMS = 4
"""Prompts begin like one of so many."""


class Act(enum.StrEnum):
    """What befalls a process."""

    KILL = "kill"
    """It ends at once."""
    STOP = "stop"
    """It stands still, and says nothing, until somebody ends it."""


@dataclass(frozen=True)
class Blow:
    """What befalls whom, and when."""

    after_tokens: int
    """That clients have got."""
    victim: str
    """A worker's name, or ORCHESTRATOR."""
    act: Act

    def __str__(self) -> str:
        return f"after {self.after_tokens} tokens: {self.act.value} {self.victim}"


@dataclass(frozen=True)
class Leave:
    """When a client goes away."""

    after_events: int
    """Of its stream; 0: it has only asked."""
    pause_s: float
    """Then."""


@dataclass(frozen=True)
class Ask:
    """One request."""

    number: int
    stem: int
    """Which beginning its prompt has."""
    num_prompt_tokens: int
    vocab_size: int
    """Its token ids are below."""
    params: SamplingParams
    deadline_s: float | None = None
    leave: Leave | None = None

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """Prompts of a stem are beginnings of each other."""
        rng = random.Random(self.stem)
        return tuple(rng.randrange(self.vocab_size) for _ in range(self.num_prompt_tokens))


@dataclass(frozen=True)
class Shape:
    """What schedules are made for."""

    victims: Sequence[str]
    """That may be struck."""
    vocab_size: int
    """Prompts have token ids below this."""
    num_asks: int = 40
    max_prompt_tokens: int = 150
    max_output_tokens: int = 40
    num_blows: int = 4
    max_rate: float = 0.05
    """Of calls that the network does not pass on as it should, at most."""


@dataclass(frozen=True)
class Schedule:
    """What happens, in the order in which it does."""

    seed: int
    asks: tuple[Ask, ...]
    """At once."""
    blows: tuple[Blow, ...]
    rate: float
    """The part of all calls that something happens to (chaos_faults.SeededPlan, with the same seed)."""

    @classmethod
    def of(cls, seed: int, shape: Shape) -> Self:
        """The seed's."""
        rng = random.Random(f"chaos {seed}")
        asks = tuple(_ask(number, shape, rng) for number in range(shape.num_asks))
        num_tokens = sum(ask.params.max_tokens for ask in asks if ask.leave is None)
        moments = sorted(rng.randrange(num_tokens * 3 // 4) for _ in range(shape.num_blows))
        blows = tuple(
            Blow(moment, rng.choice(shape.victims), rng.choices([Act.KILL, Act.STOP], [3, 1])[0]) for moment in moments
        )
        return cls(seed, asks, blows, rng.uniform(0, shape.max_rate))

    @property
    def calm(self) -> Self:
        """The same requests, and nothing happens."""
        asks = tuple(replace(ask, deadline_s=None, leave=None) for ask in self.asks)
        return replace(self, asks=asks, blows=(), rate=0.0)

    def __str__(self) -> str:
        num_leaving = sum(ask.leave is not None for ask in self.asks)
        num_hasty = sum(ask.deadline_s is not None for ask in self.asks)
        blows = "".join(f"\n  {blow}" for blow in self.blows)
        return (
            f"seed {self.seed}: {len(self.asks)} requests, {num_leaving} of clients that leave, {num_hasty} with a "
            f"deadline; {self.rate:.1%} of calls slow, lost, dropped or repeated{blows}"
        )


def _ask(number: int, shape: Shape, rng: random.Random) -> Ask:
    params = SamplingParams(
        max_tokens=rng.randint(1, shape.max_output_tokens),
        temperature=rng.choice([0.0, 0.8]),
        seed=rng.getrandbits(64),
        presence_penalty=rng.choice([0.0, 0.5]),
        ignore_eos=True,
        logprobs=0,
        n=rng.choices([1, 2], [7, 1])[0],
    )
    leaves, is_hasty = rng.random() < 0.25, rng.random() < 0.1
    return Ask(
        number,
        stem=rng.randrange(_NUM_STEMS),
        num_prompt_tokens=rng.randint(1, shape.max_prompt_tokens),
        vocab_size=shape.vocab_size,
        params=params,
        deadline_s=rng.uniform(0.5, 4.0) if is_hasty else None,
        leave=Leave(rng.choice([0, 1, 2, rng.randint(3, 12)]), rng.uniform(0, _PAUSE_S)) if leaves else None,
    )
