"""Chaos schedules. A seed determines the requests, the process faults with their times, and the rate of network faults.

A process fault is injected when all clients together have received a given number of tokens. A client cancels after a
given number of events of its stream. A schedule therefore does not depend on the speed of the machine. Does no I/O.
"""

import enum
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from baton.sampling_params import SamplingParams

ORCHESTRATOR = "orchestrator"
NUM_ENGINES = 2
"""Number of generation engines in the cluster of `baton chaos`."""
_PAUSE_S = 0.4
"""Maximum seconds between a client's decision to cancel and the cancellation. The pause is random, so that
cancellations hit requests in all phases."""
_NUM_STEMS = 4
"""Number of different prefixes that prompts begin with."""


class Act(enum.StrEnum):
    """Kind of a process fault."""

    KILL = "kill"
    """The process is killed immediately."""
    STOP = "stop"
    """The process is stopped. It answers nothing until it is killed."""
    HANG = "hang"
    """The engine's thread is stopped until the process is killed. Other threads of the process still answer."""
    SLOW = "slow down"
    """The engine's process is limited to a fifth of a core for half a minute."""


@dataclass(frozen=True)
class Blow:
    """One process fault, with its target and its time."""

    after_tokens: int
    """Number of tokens after which the fault is injected. Tokens received by all clients count together."""
    victim: str
    """Name of the process to hit: a worker's name, or ORCHESTRATOR."""
    act: Act

    def __str__(self) -> str:
        return f"after {self.after_tokens} tokens: {self.act.value} {self.victim}"


@dataclass(frozen=True)
class Leave:
    """Point in a request at which the client cancels it."""

    after_events: int
    """Number of events of the stream after which the client decides to cancel. 0: immediately after it has sent the
    request."""
    pause_s: float
    """Seconds from the client's decision to cancel to the cancellation."""


@dataclass(frozen=True)
class Ask:
    """One request of a schedule."""

    number: int
    stem: int
    """Index of the common prefix that the prompt begins with. Prompts with the same index share it."""
    num_prompt_tokens: int
    vocab_size: int
    """Size of the vocabulary. The prompt uses token ids in [0, vocab_size)."""
    params: SamplingParams
    deadline_s: float | None = None
    leave: Leave | None = None

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """Token ids of the prompt. If two prompts have the same `stem`, the shorter prompt is a prefix of the
        longer."""
        rng = random.Random(self.stem)
        return tuple(rng.randrange(self.vocab_size) for _ in range(self.num_prompt_tokens))


@dataclass(frozen=True)
class Shape:
    """Numbers and limits from which a schedule is generated, and the processes that its faults may hit."""

    victims: Sequence[str]
    """Names of the processes that may be killed or stopped."""
    vocab_size: int
    """Size of the vocabulary. Prompts use token ids in [0, vocab_size)."""
    num_asks: int = 40
    max_prompt_tokens: int = 150
    max_output_tokens: int = 40
    num_blows: int = 4
    """Number of process faults: each kills or stops one process."""
    engines: Sequence[str] = ()
    """Names of the engines that may get an engine fault (a hung thread or a slow process)."""
    num_hung: int = 0
    num_slow: int = 0
    """Number of engines that are slowed down. `num_hung` plus `num_slow` must not exceed the number of engines."""
    max_rate: float = 0.05
    """Maximum fraction of calls that get a network fault."""


@dataclass(frozen=True)
class Schedule:
    """Requests, process faults, and rate of network faults for one chaos run. One seed determines all of them."""

    seed: int
    asks: tuple[Ask, ...]
    """Requests, all sent at the same time."""
    blows: tuple[Blow, ...]
    rate: float
    """Fraction of calls that get a network fault. The faults are selected by `baton_lab.chaos.faults.SeededPlan` with
    the same seed."""

    @classmethod
    def of(cls, seed: int, shape: Shape) -> Self:
        """Return the schedule that the seed and the shape determine."""
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
        """Return the same schedule without deadlines, cancellations, process faults and network faults."""
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
    """Return the process faults together with engine faults, each for a different engine. Other faults of slow engines
    are removed, because a slow engine must survive."""
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
