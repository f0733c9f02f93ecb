"""What a chain will do with a prompt: which rank takes what, and how long that takes; and what a generation step takes.
Asked for every request.

Everything in service that needs a prediction asks here: division and width of a chain, the order of jobs, the bound
after which a chain counts as stalled. A measured calibration counts as it is. Nominal costs are scaled by what finished
jobs took (`planning.pace`), from the first one on, and anew in each of the orchestrator's lives.

Partitions are KVR-P (KV-Runahead, ICML 2024, section 4.2) over knots that are searched when the planner is made;
docs/kv_runahead.md. Pure. Called on the orchestrator's asyncio loop: a call costs a tenth of a millisecond or two for
few ranks. Making a planner costs some tenths of a second for 4 ranks and some seconds for 8: that belongs in a thread.
"""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from baton.errors import ConfigError, InvalidArgumentError
from baton.results import RankTiming
from baton.types import TokenRange
from planning.calibration import Calibration
from planning.cost_model import BATON, CostModel, Protocol
from planning.local_prefill import LocalPrefill
from planning.pace import Pace
from planning.partition import check_partition_request
from planning.partition_table import Knot, PartitionTable, PredictedPartitioner, build_table
from planning.search import analytic_seed, as_ranges, tapered
from planning.step_times import StepTimes
from planning.wavefront import chain_ttft, rank_seconds, work_of

_SEARCHED_RANKS = 8
"""Wider chains have no knots, for a search takes a second there: a few shapes are compared by their predicted times."""
_CLOSE_RANKS = 4
"""Up to this width knots lie a factor of 2 apart, which costs a percent or two between them; above, a factor of 4."""
_LEAST_KNOT = 16
_PASSED_OVER = 64
"""Decisions against a local prefill after which the oldest observation of one no longer counts."""


@dataclass(frozen=True)
class Basis:
    """What predictions rest on. Replaced as a whole."""

    calibration: Calibration
    cost: CostModel
    """The calibration's, scaled by the ranks' pace unless it was measured."""
    knots: PredictedPartitioner


class ChainPlanner:
    """Plans chains of up to `max_ranks` ranks by one calibration's costs. Threads may ask it; one of them tells it what
    else to go by (`adopt`, `use`, `use_steps`, `observe` and the like)."""

    def __init__(
        self,
        calibration: Calibration,
        protocol: Protocol = BATON,
        *,
        max_ranks: int,
        max_tokens: int,
        steps: StepTimes | None = None,
        local: LocalPrefill | None = None,
    ) -> None:
        """Searches knots for prompts of up to `max_tokens`; longer ones are divided in the same proportions. Without
        `steps` there is no answer to `step_s`, without `local` none to `local_s`. Raises InvalidArgumentError for less
        than one rank or token."""
        for name, value in (("max_ranks", max_ranks), ("max_tokens", max_tokens)):
            if value < 1:
                raise InvalidArgumentError(f"{name} = {value} is out of range: use at least 1")
        self.max_ranks = max_ranks
        self.max_tokens = max_tokens
        self.local = local
        """How generation groups prefill; None: nobody has said."""
        self._steps = steps
        self._protocol = protocol
        self._num_searched = min(max_ranks, _SEARCHED_RANKS)
        self._pace, self._push_pace, self._local_pace = Pace(), Pace(), Pace()
        self._num_passed_over = 0
        self._basis = self.search(calibration)

    @property
    def calibration(self) -> Calibration:
        """In force now; says whether it was measured."""
        return self._basis.calibration

    @property
    def cost(self) -> CostModel:
        """That predictions are made of."""
        return self._basis.cost

    @property
    def steps(self) -> StepTimes | None:
        """What generation steps take, by rows and tokens; None: nobody has said."""
        return self._steps

    def use_steps(self, steps: StepTimes) -> None:
        """Predicts generation steps by these from here on."""
        self._steps = steps

    def search(self, calibration: Calibration) -> Basis:
        """What predicting by another calibration takes; changes nothing. Blocks while knots are searched: from few
        tokens to `max_tokens`, each a factor shorter than the next."""
        knots: dict[int, tuple[Knot, ...]] = {}
        for width in range(2, self._num_searched + 1):
            least, longest = max(width, _LEAST_KNOT), max(width, self.max_tokens)
            factor = 2 if width <= _CLOSE_RANKS else 4
            powers = range(1 + int(math.log(longest / least, factor))) if longest > least else range(1)
            contexts = [min(least, longest), *(longest // factor**power for power in powers)]
            table = build_table("", calibration.cost, self._protocol, contexts=contexts, ranks=[width])
            knots.update(table.knots)
        return Basis(
            calibration, calibration.cost, PredictedPartitioner(PartitionTable(calibration.fingerprint, knots))
        )

    def adopt(self, basis: Basis) -> None:
        """Predicts by what `search` found from here on; in calls that have begun, the former counts. What was observed
        is forgotten."""
        self._pace, self._push_pace, self._local_pace = Pace(), Pace(), Pace()
        self._basis = basis

    def use(self, calibration: Calibration) -> None:
        """Predicts by another calibration: searches, then adopts."""
        self.adopt(self.search(calibration))

    def observe(self, group: Hashable, ranks: Sequence[RankTiming]) -> None:
        """A chain of that group has done a job, and this is what its ranks took: nominal costs are scaled accordingly
        from here on. Where they were measured, only what pushing KV takes changes."""
        basis = self._basis
        if not ranks:
            return
        run_ns = max(rank.end_ns for rank in ranks) - min(rank.start_ns for rank in ranks)
        tail_ns = max(rank.push_end_ns for rank in ranks) - max(rank.end_ns for rank in ranks)
        num_bytes = sum(rank.num_bytes_pushed for rank in ranks)
        if num_bytes:
            self._push_pace.note(max(tail_ns, 0) / 1e9, self._push_s(num_bytes, run_ns / 1e9))
        if basis.calibration.is_measured:
            return
        nominal = basis.calibration.cost
        self._pace.observe(group, ranks, lambda chunks: self._rank_s(chunks, nominal))
        self._basis = replace(basis, cost=nominal.times(self._pace.factor))

    def chunks(self, tokens: TokenRange, num_ranks: int) -> tuple[TokenRange, ...]:
        """One consecutive, non-empty range a rank, in rank order, covering `tokens`; `tokens.start` tokens are cached.
        Fewer ranges than ranks where there are fewer tokens.

        Knots are searched without a cached prefix, which makes the best chunks more even. Behind one, and where knots
        lie far apart, their proportions are compared with chunks of equal work by predicted times, and the better ones
        taken. Raises InvalidArgumentError for no tokens, or ranks that are not 1 to `max_ranks`.
        """
        check_partition_request(tokens, num_ranks)
        if num_ranks > self.max_ranks:
            raise InvalidArgumentError(f"num_ranks = {num_ranks} is out of range: this planner has {self.max_ranks}")
        width = min(num_ranks, len(tokens))
        if width == 1:
            return (tokens,)
        if not tokens.start and width <= _CLOSE_RANKS:
            return self._basis.knots.partition(tokens, width)
        basis = self._basis
        shapes = np.array(self._shapes(tokens, width, basis), dtype=np.float64)
        times = chain_ttft(shapes, basis.cost, self._protocol, cached=tokens.start)
        return as_ranges([int(chunk) for chunk in shapes[times.argmin()]], tokens.start)

    def ttft_s(self, chunks: Sequence[TokenRange]) -> float:
        """Seconds to the first token on an idle chain of one rank a chunk."""
        lengths, cached = _lengths(chunks)
        return float(chain_ttft(lengths, self.cost, self._protocol, cached=cached))

    def rank_s(self, chunks: Sequence[TokenRange]) -> tuple[float, ...]:
        """Seconds that each rank is busy with its layers, waits aside; what else a request takes is nobody's work."""
        return self._rank_s(chunks, self.cost)

    def step_s(self, batch: float, context: float) -> float:
        """Seconds of a generation step of `batch` rows with `context` tokens, in the mean; as `StepTimes.step_s`.
        Raises ConfigError when the planner was given no step times."""
        if self._steps is None:
            raise ConfigError("this planner knows no step times: give it some, nominal ones at least")
        return self._steps.step_s(batch, context)

    def push_s(self, num_tokens: int, prefill_s: float) -> float:
        """Seconds until the KV of so many tokens is where it is to be, after the chain that computes in `prefill_s` is
        done: the last layer's, and whatever did not fit in between. By nominal bandwidth, scaled by what jobs took."""
        if self.cost.push is not None:
            return 0.0  # ttft_s has it
        num_bytes = num_tokens * self.cost.kv_bytes * self.cost.num_layers
        return self._push_pace.factor * self._push_s(num_bytes, prefill_s)

    def local_s(self, tokens: TokenRange, num_rows: int, context: float) -> tuple[float, float] | None:
        """Seconds that a generation group computes to prefill `tokens` by itself, the earlier ones cached, and that it
        decodes `num_rows` rows of `context` tokens in between. None when nobody has said how such groups work. Both
        are scaled by `local_factor`."""
        if self.local is None or self._steps is None:
            return None
        prefill_s = sum(self._rank_s((tokens,), self._basis.calibration.cost)) / self.local.speed
        step_s = self._steps.step_s(num_rows, context) if num_rows else 0.0
        factor = self.local_factor
        return factor * prefill_s, factor * self.local.steps_s(prefill_s, len(tokens), step_s)

    @property
    def local_factor(self) -> float:
        """What `local_s` is scaled by: as `observe_local` was told; until it was, by the ranks' pace."""
        return (self._local_pace if len(self._local_pace) else self._pace).factor

    def observe_local(self, observed_s: float, predicted_s: float) -> None:
        """A generation group has prefilled; `predicted_s`: unscaled, what `local_s` says in sum."""
        self._num_passed_over = 0
        self._local_pace.note(observed_s, predicted_s)

    def pass_over_local(self) -> None:
        """A chain is predicted to be faster than a generation group. What was observed of such groups is forgotten bit
        by bit, as long as that goes on: else one that was slow once would never be tried again."""
        self._num_passed_over += 1
        if self._num_passed_over >= _PASSED_OVER:
            self._num_passed_over = 0
            self._local_pace.forget_oldest()

    def _push_s(self, num_bytes: int, prefill_s: float) -> float:
        """By nominal rates, beyond what overlaps."""
        link = self._basis.calibration.cost.link
        last_s = num_bytes / self.cost.num_layers / link.bandwidth
        return link.latency_s + max(last_s, num_bytes / link.bandwidth - prefill_s)

    def layer_s(self, chunks: Sequence[TokenRange]) -> float:
        """Seconds of the longest step of one layer anywhere: a rank's computation, or a message on a link. A chain
        that makes no progress for much longer has stalled."""
        lengths, cached = _lengths(chunks)
        cost = self.cost
        work = work_of(np.array([lengths], dtype=np.float64), cost, self._protocol, cached)
        message_s = cost.link.seconds(sum(lengths[:-1]) * cost.kv_bytes) if len(lengths) > 1 else 0.0
        return max(float(work.layer.max()), cost.issue_s, message_s)

    def _rank_s(self, chunks: Sequence[TokenRange], cost: CostModel) -> tuple[float, ...]:
        lengths, cached = _lengths(chunks)
        work = work_of(np.array([lengths], dtype=np.float64), cost, self._protocol, cached)
        is_last = np.arange(len(lengths)) == len(lengths) - 1
        return tuple(float(each) for each in rank_seconds(work, is_last, cost, self._protocol)[0])

    def _shapes(self, tokens: TokenRange, width: int, basis: Basis) -> list[tuple[int, ...]]:
        """What is worth comparing where no knot says it."""
        num_tokens, cost = len(tokens), basis.cost
        balanced = analytic_seed(num_tokens, width, cost, self._protocol.kernel, cached=tokens.start)
        if width > self._num_searched:
            return [balanced, *tapered(num_tokens, width)]
        return [balanced, tuple(len(each) for each in basis.knots.partition(tokens, width))]


def _lengths(chunks: Sequence[TokenRange]) -> tuple[tuple[int, ...], int]:
    """Tokens of each chunk, and tokens cached before the first."""
    if not chunks:
        raise InvalidArgumentError("chunks is empty: give at least one range")
    return tuple(len(each) for each in chunks), chunks[0].start
