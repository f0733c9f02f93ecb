"""Break-even of disaggregated prefill: compares two separate pools of workers with one pool of engines that also
prefill.

The two ways to use the workers are called sides. Both sides have the same workers, and serve requests of one kind that
arrive at a constant rate:

    apart     disaggregated: several prefill ranks prefill a prompt together (a chain), the KV is pushed, and engines
              decode without prefills. A prompt is prefilled on the number of ranks that is fastest for it.
    together  colocated: every worker is an engine, which prefills its own prompts in chunks between decode steps. A
              prefill rank becomes a fraction or a multiple of an engine, depending on its speed. Each engine has fewer
              sequences than on the other side, because there are more engines.

The predictions use the formulas of the serving code: `baton.planning.planner` for the time to first token, and the
planner's step times for all later tokens. The mean number of sequences in an engine follows from Little's law:

    sequences = requests per second * decode tokens per request * seconds per token

An engine that spends a fraction p of its time on prefill has the fraction 1 - p left for decode steps. Waiting for
other requests is not modeled. A pool is full if it gets more work than it can do, or more requests than it has slots. A
side can sustain a rate if none of its pools is full. For a rate that a side cannot sustain, nothing is predicted. Does
no I/O.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from baton.errors import InvalidArgumentError
from baton.planning.local_prefill import LocalPrefill
from baton.planning.planner import ChainPlanner
from baton.results.prefill_trace import PlacementTerms
from baton.types import TokenRange
from baton_lab.study.terms import chain_terms, local_terms

_LEAST_PROMPT = 16
_POINTS_A_DOUBLING = 4
_BISECTIONS = 60
_RATE_STEPS = 48


@dataclass(frozen=True)
class Pools:
    """Workers of a cluster, divided into a prefill pool and a generation pool. Raises InvalidArgumentError if a number
    is below 1."""

    num_groups: int = 1
    """Number of prefill groups."""
    num_ranks: int = 2
    """Number of ranks of each prefill group."""
    num_engines: int = 1
    """Number of generation engines."""
    num_slots: int = 16
    """Maximum number of requests that an engine holds at a time. Requests whose KV has not arrived yet are included."""

    def __post_init__(self) -> None:
        for name in ("num_groups", "num_ranks", "num_engines", "num_slots"):
            if getattr(self, name) < 1:
                raise InvalidArgumentError(f"{name} = {getattr(self, name)} is out of range: use at least 1")


@dataclass(frozen=True)
class Demand:
    """Workload of requests that are all of one kind: the numbers of prompt and output tokens, and the rate in requests
    per second of the whole cluster."""

    prompt_tokens: int
    output_tokens: int
    rate: float

    def __post_init__(self) -> None:
        for name, least in (("prompt_tokens", 1), ("output_tokens", 1), ("rate", 0)):
            value = getattr(self, name)
            if not least <= value < math.inf:
                raise InvalidArgumentError(f"{name} = {value} is out of range: use at least {least}")


@dataclass(frozen=True)
class Side:
    """Predictions for one side (disaggregated or colocated prefill) under a demand that it can sustain."""

    terms: PlacementTerms
    """Components of the time to first token."""
    num_ranks: int
    """Number of prefill ranks that prefill a prompt together; 0 if the engine prefills."""
    step_s: float
    """Duration in seconds of a decode step during which nothing is prefilled."""
    longest_step_s: float
    """Duration in seconds of a decode step during which another prompt is prefilled. Equal to `step_s` if engines do
    not prefill."""
    token_s: float
    """Mean time in seconds between two output tokens of a request."""
    num_rows: float
    """Mean number of sequences in the batch that one engine decodes."""
    prefill_load: float
    """Fraction of time in which a prefill group (disaggregated side) or an engine (colocated side) is busy with
    prompts."""
    answer_s: float
    """Seconds until the last token of a request, counted from its assignment to workers. The time that it waits for
    other requests is not included."""

    @property
    def first_s(self) -> float:
        """Seconds until the first token of a request, counted from its assignment to workers. The time that it waits
        for other requests is not included."""
        return self.terms.own_s


Sides = tuple[Side | None, Side | None]
"""Predictions for disaggregated and for colocated prefill, as (apart, together). None if this kind of prefill cannot
sustain the demand."""


@dataclass(frozen=True)
class Span:
    """Range of prompt lengths, or of request rates, in which the same kind of prefill is better: disaggregated
    ("apart") or colocated ("together")."""

    first: float
    last: float
    better: str
    """Name of the better side: "apart" (disaggregated) or "together" (colocated). "only apart" or "only together" if
    only this side can sustain the demand; "neither" if none can."""


class BreakEven:
    """Comparison of disaggregated ("apart") with colocated ("together") prefill, for one planner and one set of
    workers."""

    def __init__(self, planner: ChainPlanner, pools: Pools) -> None:
        """Create a comparison that uses the planner's predictions. Raises InvalidArgumentError if the planner does not
        predict local prefill, or if a prefill group of `pools` has more ranks than it plans for."""
        if planner.local is None:
            raise InvalidArgumentError("the planner has no configuration of local prefill: give one")
        if planner.max_ranks < pools.num_ranks:
            raise InvalidArgumentError(f"num_ranks = {pools.num_ranks}: the planner plans {planner.max_ranks} at most")
        self._planner = planner
        self._pools = pools
        self._local: LocalPrefill = planner.local
        self.num_together = pools.num_engines + pools.num_groups * pools.num_ranks / planner.local.speed
        """Number of engines if all workers, including prefill ranks, become engines. It can be a fraction, because a
        rank may be slower or faster than an engine."""
        self._sides: dict[Demand, Sides] = {}
        self._chains: dict[int, tuple[int, float, float]] = {}
        """Fastest chain of prefill ranks for a prompt, by the number of prompt tokens. Each value is (number of ranks,
        seconds to the first token, seconds that the busiest rank computes)."""

    def sides(self, demand: Demand) -> Sides:
        """Return the predictions for disaggregated and for colocated prefill. The results are cached."""
        if demand not in self._sides:
            self._sides[demand] = self.apart(demand), self.together(demand)
        return self._sides[demand]

    def apart(self, demand: Demand) -> Side | None:
        """Return the prediction for disaggregated prefill. None if the prefill ranks or the engines cannot sustain the
        demand."""
        pools = self._pools
        num_ranks, prefill_s, busy_s = self._chain(demand.prompt_tokens)
        load = demand.rate / pools.num_groups * busy_s * num_ranks / pools.num_ranks
        rate = demand.rate / pools.num_engines
        num_rows = self._rows(demand, rate)
        if num_rows is None or load >= 1:
            return None
        batch = (num_rows, _context(demand))
        terms = chain_terms(self._planner, prefill_s, demand.prompt_tokens, batch, is_elsewhere=True)
        if num_rows + rate * terms.own_s > pools.num_slots:
            return None
        step_s = self._planner.step_s(max(num_rows, 1.0), batch[1])
        return _side(demand, terms, step_s, step_s, (num_ranks, num_rows, load, step_s))

    def together(self, demand: Demand) -> Side | None:
        """Return the prediction for colocated prefill, with engines that also prefill. None if the engines cannot
        sustain the demand."""
        tokens, rate = TokenRange(0, demand.prompt_tokens), demand.rate / self.num_together
        alone = local_terms(self._planner, tokens, (0.0, 0.0))
        assert alone is not None  # the planner knows how engines prefill
        part = rate * alone.prefill_s
        num_rows = self._rows(demand, rate, part) if part < 1 else None
        if num_rows is None:
            return None
        batch = (num_rows, _context(demand))
        terms = local_terms(self._planner, tokens, batch)
        assert terms is not None
        load = rate * terms.own_s
        if load >= 1 or num_rows + load > self._pools.num_slots:
            return None
        step_s = self._planner.step_s(max(num_rows, 1.0), batch[1])
        chunk_s = self._local.chunk_s(terms.prefill_s, len(tokens), step_s)
        return _side(demand, terms, step_s, step_s + chunk_s, (0, num_rows, load, step_s / (1 - part)))

    def capacities(self, demand: Demand) -> tuple[float, float]:
        """Return the highest rates in requests per second that can be sustained with the prompt and output lengths of
        `demand`: (rate with disaggregated prefill, rate with colocated prefill). A rate is 0 if none can be
        sustained."""
        return self._capacity(self.apart, demand), self._capacity(self.together, demand)

    def by_prompt(self, demand: Demand, key: Callable[[Side], float]) -> tuple[Span, ...]:
        """Compare disaggregated with colocated prefill for prompt lengths up to the planner's maximum. Return ranges of
        lengths in tokens, each with the side (disaggregated or colocated) for which `key` is smaller."""
        longest = self._planner.max_tokens
        num_points = int(_POINTS_A_DOUBLING * math.log2(max(longest / _LEAST_PROMPT, 2)))
        ratio = (longest / _LEAST_PROMPT) ** (1 / num_points)
        points = sorted({min(longest, round(_LEAST_PROMPT * ratio**point)) for point in range(num_points + 1)})

        def better(tokens: float) -> str:
            return _better(self.sides(replace(demand, prompt_tokens=int(tokens))), key)

        return _spans(points, better, 1)

    def by_rate(self, demand: Demand, key: Callable[[Side], float]) -> tuple[Span, ...]:
        """Compare disaggregated with colocated prefill at different request rates. The rates range from 1/1000 of the
        highest rate that either of them can sustain, up to this highest rate. Return ranges of rates in requests per
        second, each with the side (disaggregated or colocated) for which `key` is smaller. Empty if no rate can be
        sustained."""
        most = max(self.capacities(demand))
        if not most:
            return ()
        points = [most / 1000 * 1000 ** (step / _RATE_STEPS) for step in range(_RATE_STEPS)] + [most]

        def better(rate: float) -> str:
            return _better(self.sides(replace(demand, rate=rate)), key)

        return _spans(points, better, most / 1e5)

    def _chain(self, prompt_tokens: int) -> tuple[int, float, float]:
        """Return the fastest number of prefill ranks for a prompt, the seconds to the first token, and the seconds that
        the busiest of these ranks computes."""
        if prompt_tokens not in self._chains:
            prompt, most = TokenRange(0, prompt_tokens), self._pools.num_ranks
            widths = [width for width in (*_powers(most), most) if width <= prompt_tokens]
            chunks = min((self._planner.chunks(prompt, width) for width in widths), key=self._planner.ttft_s)
            times = self._planner.ttft_s(chunks), max(self._planner.rank_s(chunks))
            self._chains[prompt_tokens] = len(chunks), *times
        return self._chains[prompt_tokens]

    def _rows(self, demand: Demand, rate: float, part: float = 0.0) -> float | None:
        """Return the mean number of sequences of an engine that gets `rate` requests per second and spends the fraction
        `part` of its time on prefill. It is the smallest number with which the engine generates as many tokens per
        second as the requests need. None if it exceeds the engine's slots."""
        tokens_s, context = rate * (demand.output_tokens - 1), _context(demand)

        def lacking(num_rows: float) -> bool:
            return tokens_s * self._planner.step_s(max(num_rows, 1.0), context) / (1 - part) > num_rows

        low, high = 0.0, float(self._pools.num_slots)
        if lacking(high):
            return None
        if not lacking(low):
            return low
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            low, high = (middle, high) if lacking(middle) else (low, middle)
        return high

    def _capacity(self, side: Callable[[Demand], Side | None], demand: Demand) -> float:
        if side(replace(demand, rate=0.0)) is None:
            return 0.0
        low, high = 0.0, 1.0
        while side(replace(demand, rate=high)) is not None:
            low, high = high, 2 * high
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            carried = side(replace(demand, rate=middle)) is not None
            low, high = (middle, high) if carried else (low, middle)
        return low


def _side(
    demand: Demand,
    terms: PlacementTerms,
    step_s: float,
    longest_step_s: float,
    numbers: tuple[int, float, float, float],
) -> Side:
    num_ranks, num_rows, load, token_s = numbers
    answer_s = terms.own_s + (demand.output_tokens - 1) * token_s
    return Side(terms, num_ranks, step_s, longest_step_s, token_s, num_rows, load, answer_s)


def _context(demand: Demand) -> float:
    """Return the mean number of tokens of a sequence between its first and last output token."""
    return demand.prompt_tokens + demand.output_tokens / 2


def _powers(most: int) -> list[int]:
    """Return the powers of two below `most`."""
    return [1 << power for power in range(most.bit_length()) if 1 << power < most]


def _better(sides: Sides, key: Callable[[Side], float]) -> str:
    apart, together = sides
    if apart is None:
        return "neither" if together is None else "only together"
    if together is None:
        return "only apart"
    return "apart" if key(apart) < key(together) else "together"


def _spans(points: Sequence[float], better: Callable[[float], str], width: float) -> tuple[Span, ...]:
    """Return the ranges in which `better` returns the same value. It is called at `points`, and between points whose
    values differ. The ends of a range are accurate to `width`."""
    spans: list[Span] = []
    first, before, word = points[0], points[0], better(points[0])
    for point in points[1:]:
        following = better(point)
        while following != word:  # the result may change several times before the next point
            low, high = before, point
            while high - low > width:
                middle = (low + high) // 2 if width == 1 else (low + high) / 2
                low, high = (middle, high) if better(middle) == word else (low, middle)
            spans.append(Span(first, low, word))
            first, before, word = high, high, better(high)
        before = point
    return (*spans, Span(first, points[-1], word))
