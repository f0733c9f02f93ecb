"""Predictions for every request: how a prompt is divided among a chain's ranks, and the times of chains and of
generation steps.

A running cluster takes all predictions from the planner: for the division and width of a chain, for the order of jobs,
and for the time after which a chain counts as stalled. A measured calibration is used unchanged. Nominal costs are
scaled by the times of finished jobs (`baton.planning.pace`), starting at the first job after each start of the
orchestrator.

Partitions are KVR-P (KV-Runahead, ICML 2024, section 4.2): they are interpolated between knots, which are partitions
that are searched when the planner is made; see docs/kv_runahead.md. Pure. Called on the orchestrator's asyncio loop: a
call takes 0.1 to 0.2 ms for few ranks. Making a planner takes some tenths of a second for 4 ranks and some seconds for
8, so it is done in a thread.
"""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from baton.errors import ConfigError, InvalidArgumentError
from baton.planning.calibration import Calibration
from baton.planning.chain.partition import as_ranges, check_partition_request
from baton.planning.chain.partition_table import PartitionTable, build_table
from baton.planning.chain.search import analytic_seed, tapered
from baton.planning.chain.wavefront import chain_ttft, rank_seconds, work_of
from baton.planning.cost_model import BATON, CostModel
from baton.planning.local_prefill import LocalPrefill
from baton.planning.pace import Pace
from baton.planning.step_times import StepTimes
from baton.results.prefill_trace import RankTiming
from baton.types import TokenRange

_SEARCHED_RANKS = 8
"""Maximum width of a chain for which knots are searched; at this width a search takes a second. For wider chains a few
partitions are compared by their predicted times."""
_CLOSE_RANKS = 4
"""Maximum width of a chain whose knots are a factor of 2 apart in length, which loses 1 or 2 % of speed between them.
For wider chains the factor is 4."""
_LEAST_KNOT = 16
_BELIEVED_S = 0.5
"""Seconds of predicted computing. A first job above it is a better estimate of the machine than the nominal rates."""
_FETCH_S = 0.004
"""Nominal fixed seconds of a fetch of cached KV, without the link's latency and bytes: two calls, a connection, and
files."""


@dataclass(frozen=True)
class PredictionBasis:
    """Calibration, costs and knots from which predictions are made. Immutable: the planner replaces the
    whole object."""

    calibration: Calibration
    cost: CostModel
    """Costs of the calibration. If they were not measured, they are scaled by the ranks' pace."""
    knots: PartitionTable


class ChainPlanner:
    """Plans chains of up to `max_ranks` ranks with the costs of one calibration. Any thread may request predictions.
    Only one thread may change their basis (`adopt`, `use_steps`, `observe`, `observe_local`, `pass_over_local`)."""

    def __init__(
        self,
        calibration: Calibration,
        *,
        max_ranks: int,
        max_tokens: int,
        steps: StepTimes | None = None,
        local: LocalPrefill | None = None,
        table: PartitionTable | None = None,
    ) -> None:
        """Search knots for prompts of up to `max_tokens`, unless `table` contains the knots of an equal planner. Longer
        prompts are divided in the same proportions. Without `steps`, `step_s` raises ConfigError. Without `steps` or
        `local`, `local_s` returns None. Raises InvalidArgumentError if `max_ranks` or `max_tokens` is below 1."""
        for name, value in (("max_ranks", max_ranks), ("max_tokens", max_tokens)):
            if value < 1:
                raise InvalidArgumentError(f"{name} = {value} is out of range: use at least 1")
        self.max_ranks = max_ranks
        self.max_tokens = max_tokens
        self.local = local
        """Configuration of local prefill by generation groups; None if unknown."""
        self.steps = steps
        """Times of generation steps, by sequences and tokens; None if unknown."""
        self._num_searched = min(max_ranks, _SEARCHED_RANKS)
        if table is None:
            self._basis = self.search(calibration)
        else:
            self._basis = PredictionBasis(calibration, calibration.cost, table)
        self._forget()

    @property
    def calibration(self) -> Calibration:
        """Calibration that is in use now, measured or nominal."""
        return self._basis.calibration

    @property
    def table(self) -> PartitionTable:
        """Knots that were searched."""
        return self._basis.knots

    @property
    def cost(self) -> CostModel:
        """Costs from which predictions are made. If they were not measured, they are scaled by the ranks' pace."""
        return self._basis.cost

    def use_steps(self, steps: StepTimes) -> None:
        """Predict generation steps by `steps` from now on."""
        self.steps = steps

    def search(self, calibration: Calibration) -> PredictionBasis:
        """Search the knots for another calibration and return the basis for `adopt`. Does not change the planner.
        Blocks during the search. The lengths of knots go from few tokens to `max_tokens`, with a constant factor
        between neighbours."""
        contexts = {}
        for width in range(2, self._num_searched + 1):
            least, longest = max(width, _LEAST_KNOT), max(width, self.max_tokens)
            factor = 2 if width <= _CLOSE_RANKS else 4
            powers = range(1 + int(math.log(longest / least, factor))) if longest > least else range(1)
            contexts[width] = [min(least, longest), *(longest // factor**power for power in powers)]
        return PredictionBasis(calibration, calibration.cost, build_table(calibration.cost, BATON, contexts))

    def adopt(self, basis: PredictionBasis) -> None:
        """Use a result of `search` for predictions from now on, and drop all observations. Calls that are running keep
        using the former basis."""
        self._basis = basis
        self._forget()

    def observe(self, group: Hashable, ranks: Sequence[RankTiming]) -> None:
        """Record the times that the ranks of `group` took for a finished job. Nominal costs are scaled by these times
        from now on. If costs were measured, only the prediction for pushing KV changes."""
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
        cost = nominal.times(self._pace.factor)
        fixed_s = cost.fixed_s + self._pace.fixed_s / cost.num_layers
        self._basis = replace(basis, cost=replace(cost, fixed_s=fixed_s))

    def chunks(self, tokens: TokenRange, num_ranks: int) -> tuple[TokenRange, ...]:
        """Return consecutive, non-empty ranges that cover `tokens`, one for each rank in rank order. `tokens.start`
        tokens are cached. With fewer tokens than ranks, return one range for each token.

        Knots are searched without a cached prefix. After a cached prefix, the best chunks are more equal. So after a
        prefix, and where knots are far apart, two partitions are compared by their predicted times: the proportions of
        the knots, and chunks of equal work. The faster one is returned. Raises InvalidArgumentError for no tokens, and
        for a number of ranks that is not in 1 to `max_ranks`.
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
        times = chain_ttft(shapes, basis.cost, BATON, cached=tokens.start)
        return as_ranges([int(chunk) for chunk in shapes[times.argmin()]], tokens.start)

    def ttft_s(self, chunks: Sequence[TokenRange]) -> float:
        """Return the seconds to the first token on an idle chain that has one rank for each chunk."""
        lengths, cached = _lengths(chunks)
        return float(chain_ttft(lengths, self.cost, BATON, cached=cached))

    def rank_s(self, chunks: Sequence[TokenRange]) -> tuple[float, ...]:
        """Return the seconds that each rank computes its layers, without waits and other costs of a request."""
        return self._rank_s(chunks, self.cost)

    def step_s(self, batch: float, context: float) -> float:
        """Return the seconds of a generation step of `batch` sequences with a mean of `context` tokens. Raises
        ConfigError when the planner has no step times, and InvalidArgumentError if `batch` is below 1."""
        if self.steps is None:
            raise ConfigError("this planner knows no step times: give it some, nominal ones at least")
        return self.steps.step_s(batch, context)

    def push_s(self, num_tokens: int, prefill_s: float) -> float:
        """Return the seconds from the end of a chain until all KV of its `num_tokens` tokens has arrived. The chain
        computes for `prefill_s`. At its end, the last layer's KV and all KV that could not be sent before are still
        missing. Uses the nominal bandwidth, scaled by observed pushes. 0 when the costs already include the push."""
        if self.cost.push is not None:
            return 0.0  # ttft_s includes the push
        num_bytes = num_tokens * self.cost.kv_bytes * self.cost.num_layers
        return self._push_pace.factor * self._push_s(num_bytes, prefill_s)

    def alone_s(self, tokens: TokenRange) -> float | None:
        """Return the seconds in which a generation group without running sequences prefills `tokens` by itself, with
        the earlier tokens cached. The result is not scaled by `local_factor`. None without `local`."""
        if self.local is None:
            return None
        return sum(self._rank_s((tokens,), self._basis.calibration.cost)) / self.local.speed

    def local_s(
        self, tokens: TokenRange, num_rows: float, context: float, alone_s: float | None = None
    ) -> tuple[float, float] | None:
        """Return two durations in seconds for a generation group that prefills `tokens` by itself, with the earlier
        tokens cached: the computing of the prefill, and the decode steps of `num_rows` sequences of `context` tokens
        during that time. Both are scaled by `local_factor`. None without `local` or step times. `alone_s`: result of
        the method `alone_s` for the same tokens, if already known; calculating it takes most of this call."""
        prefill_s = self.alone_s(tokens) if alone_s is None else alone_s
        if self.local is None or self.steps is None or prefill_s is None:
            return None
        step_s = self.steps.step_s(num_rows, context) if num_rows else 0.0
        pace = self._known_local_pace
        return pace.fixed_s + pace.factor * prefill_s, pace.factor * self.local.steps_s(prefill_s, len(tokens), step_s)

    @property
    def local_factor(self) -> float:
        """Factor that scales `local_s`. It is learnt by `observe_local`. Before the first call of that method, the
        factor of prefill ranks is used."""
        return self._known_local_pace.factor

    def observe_local(self, observed_s: float, predicted_s: float) -> None:
        """Record that a generation group prefilled a prompt in `observed_s`. `predicted_s` is the unscaled sum of the
        two results of `local_s`."""
        self._local_pace.note(observed_s, predicted_s)

    def pass_over_local(self) -> None:
        """Record that a chain is predicted to be faster than a generation group. If this continues, observations of
        generation groups are dropped one by one."""
        self._local_pace.pass_over()

    def fetch_s(self, num_tokens: int, *, is_far: bool) -> float:
        """Return the seconds to fetch the cached KV of `num_tokens` tokens from the prefix store of another node, or of
        the same node if not `is_far`. Uses the link's nominal bandwidth and latency, scaled by observed fetches."""
        num_bytes = num_tokens * self.cost.kv_bytes * self.cost.num_layers
        return self._fetch_pace.factor * self._nominal_fetch_s(num_bytes, is_far=is_far)

    def observe_fetch(self, num_bytes: int, observed_s: float, *, is_far: bool) -> None:
        """Record that `num_bytes` bytes of KV were fetched in `observed_s`."""
        self._fetch_pace.note(observed_s, self._nominal_fetch_s(num_bytes, is_far=is_far))

    def pass_over_fetch(self) -> None:
        """Record that computing is predicted to be faster than a possible fetch. If this continues, observations of
        fetches are dropped one by one."""
        self._fetch_pace.pass_over()

    @property
    def _known_local_pace(self) -> Pace:
        return self._local_pace if len(self._local_pace) else self._pace

    def _forget(self) -> None:
        """Drop all observations and start without any."""
        self._pace, self._local_pace = Pace(_BELIEVED_S), Pace(_BELIEVED_S)
        self._push_pace, self._fetch_pace = Pace(), Pace()

    def _nominal_fetch_s(self, num_bytes: int, *, is_far: bool) -> float:
        link = self._basis.calibration.cost.link
        return _FETCH_S + (2 * link.latency_s if is_far else 0.0) + num_bytes / link.bandwidth

    def _push_s(self, num_bytes: int, prefill_s: float) -> float:
        """Return the seconds of pushing KV that do not overlap with computing, by nominal rates."""
        link = self._basis.calibration.cost.link
        last_s = num_bytes / self.cost.num_layers / link.bandwidth
        return link.latency_s + max(last_s, num_bytes / link.bandwidth - prefill_s)

    def layer_s(self, chunks: Sequence[TokenRange]) -> float:
        """Return the seconds of the longest single operation of a layer on any rank: its computation, or a message on a
        link. A chain that makes no progress for much longer has stalled."""
        lengths, cached = _lengths(chunks)
        cost = self.cost
        work = work_of(np.array([lengths], dtype=np.float64), cost, BATON, cached)
        message_s = cost.link.seconds(sum(lengths[:-1]) * cost.kv_bytes) if len(lengths) > 1 else 0.0
        return max(float(work.layer.max()), cost.issue_s, message_s)

    def _rank_s(self, chunks: Sequence[TokenRange], cost: CostModel) -> tuple[float, ...]:
        lengths, cached = _lengths(chunks)
        work = work_of(np.array([lengths], dtype=np.float64), cost, BATON, cached)
        is_last = np.arange(len(lengths)) == len(lengths) - 1
        return tuple(float(each) for each in rank_seconds(work, is_last, cost, BATON)[0])

    def _shapes(self, tokens: TokenRange, width: int, basis: PredictionBasis) -> list[tuple[int, ...]]:
        """Return the partitions to compare when no knot is close."""
        num_tokens, cost = len(tokens), basis.cost
        balanced = analytic_seed(num_tokens, width, cost, BATON.kernel, cached=tokens.start)
        if width > self._num_searched:
            return [balanced, *tapered(num_tokens, width)]
        return [balanced, tuple(len(each) for each in basis.knots.partition(tokens, width))]


def _lengths(chunks: Sequence[TokenRange]) -> tuple[tuple[int, ...], int]:
    """Return the tokens of each chunk, and the tokens cached before the first."""
    if not chunks:
        raise InvalidArgumentError("chunks is empty: give at least one range")
    return tuple(len(each) for each in chunks), chunks[0].start
