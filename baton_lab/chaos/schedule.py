"""Schedules of chaos: the requests, the blows to processes and their times, and the rate of network faults, all a pure
function of a seed.

Blows fall after numbers of tokens, counted over all streams, and clients leave after numbers of events, so that a
schedule does the same on a fast machine and on a slow one. Pure.
"""

import enum
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from baton.sampling_params import SamplingParams

ORCHESTRATOR = "orchestrator"
NUM_ENGINES = 2
"""Generation engines of the cluster of `baton chaos`."""
_PAUSE_S = 0.4
"""Longest pause in seconds between the event at which a client decides to leave and its leaving, so that clients leave
in any phase."""
_NUM_STEMS = 4
"""Number of different beginnings that prompts have."""


class Act(enum.StrEnum):
    """Action on a process."""

    KILL = "kill"
    """The process is killed at once."""
    STOP = "stop"
    """The process stands still, and answers nothing, until it is killed."""
    HANG = "hang"
    """The engine's thread stands still, and its process answers, until it is killed."""
    SLOW = "slow down"
    """The engine's process has a fifth of a core for half a minute."""


@dataclass(frozen=True)
class Blow:
    """One process to be struck, and when."""

    after_tokens: int
    """Tokens that clients have received in all when the blow falls."""
    victim: str
    """Name of a worker, or ORCHESTRATOR."""
    act: Act

    def __str__(self) -> str:
        return f"after {self.after_tokens} tokens: {self.act.value} {self.victim}"


@dataclass(frozen=True)
class Leave:
    """When a client cancels its request."""

    after_events: int
    """Events of its stream after which the client decides to leave; 0: right after the request was sent."""
    pause_s: float
    """Seconds between the decision to leave and leaving."""


@dataclass(frozen=True)
class Ask:
    """One request of a schedule."""

    number: int
    stem: int
    """Number of the beginning that the prompt shares with others."""
    num_prompt_tokens: int
    vocab_size: int
    """Size of the vocabulary: token ids of the prompt are below it."""
    params: SamplingParams
    deadline_s: float | None = None
    leave: Leave | None = None

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """Token ids of the prompt. A shorter prompt with this stem is a prefix of a longer one."""
        rng = random.Random(self.stem)
        return tuple(rng.randrange(self.vocab_size) for _ in range(self.num_prompt_tokens))


@dataclass(frozen=True)
class Shape:
    """Limits and victims that schedules are made for."""

    victims: Sequence[str]
    """Names of the processes that may be struck."""
    vocab_size: int
    """Size of the vocabulary: token ids of prompts are below it."""
    num_asks: int = 40
    max_prompt_tokens: int = 150
    max_output_tokens: int = 40
    num_blows: int = 4
    """Processes that are killed or stopped."""
    engines: Sequence[str] = ()
    """Names of the engines that may hang or be slow."""
    num_hung: int = 0
    num_slow: int = 0
    """Engines that hang, and engines that are slow: together no more than `engines`."""
    max_rate: float = 0.05
    """Highest fraction of calls that are hit by a network fault."""


@dataclass(frozen=True)
class Schedule:
    """The requests, blows and fault rate of one seed."""

    seed: int
    asks: tuple[Ask, ...]
    """Requests, which are all sent at once."""
    blows: tuple[Blow, ...]
    rate: float
    """Fraction of all calls that are hit by a fault (baton_lab.chaos.faults.SeededPlan, with the same seed)."""

    @classmethod
    def of(cls, seed: int, shape: Shape) -> Self:
        """Return the schedule of this seed for this shape."""
        rng = random.Random(f"chaos {seed}")
        asks = tuple(_ask(number, shape, rng) for number in range(shape.num_asks))
        num_tokens = sum(ask.params.max_tokens for ask in asks if ask.leave is None)
        moments = sorted(rng.randrange(num_tokens * 3 // 4) for _ in range(shape.num_blows))
        blows = [
            Blow(moment, rng.choice(shape.victims), rng.choices([Act.KILL, Act.STOP], [3, 1])[0]) for moment in moments
        ]
        rate = rng.uniform(0, shape.max_rate)
        return cls(seed, asks, tuple(_with_engine_faults(blows, seed, num_tokens, shape)), rate)

    @property
    def calm(self) -> Self:
        """The same requests without deadlines, leaving clients, blows or faults."""
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


def _with_engine_faults(blows: Sequence[Blow], seed: int, num_tokens: int, shape: Shape) -> list[Blow]:
    """Add hanging and slow engines, each a different one. A slow engine must survive, and gets no other blows."""
    rng = random.Random(f"chaos of engines {seed}")
    acts = [Act.HANG] * shape.num_hung + [Act.SLOW] * shape.num_slow
    added = [
        Blow(rng.randrange(max(1, num_tokens // 4)), *each)
        for each in zip(rng.sample(shape.engines, len(acts)), acts, strict=True)
    ]
    slow = {blow.victim for blow in added if blow.act is Act.SLOW}
    kept = [blow for blow in blows if blow.victim not in slow]
    return sorted(kept + added, key=lambda blow: blow.after_tokens)


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
