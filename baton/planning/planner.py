"""Predictions for each request: the partition of a prompt among the ranks of a chain, and the durations of chains and
of generation steps.

A running cluster takes all predictions from the planner: to choose the partition and the number of ranks of a chain, to
order jobs, and to detect stalled chains. Costs are nominal at first, and are corrected by the observed durations of
finished jobs (`baton.planning.prefill_costs`). The observations are lost when the orchestrator restarts.

Partitions are interpolated between knots, as KVR-P in KV-Runahead (ICML 2024, section 4.2). Knots are partitions that
are searched when the planner is created; see docs/kv_runahead.md.

All predictions are pure. They run on the orchestrator's asyncio loop, and take 0.1 to 0.2 ms for few ranks. Creating a
planner takes some tenths of a second for 4 ranks and a second for 8, so it runs in a thread.
"""

import math
from collections.abc import Hashable, Sequence
from dataclasses import replace

import numpy as np

from baton.errors import InvalidArgumentError
from baton.planning.chain.partition import as_ranges, check_partition_request
from baton.planning.chain.partition_table import PartitionTable, build_table
from baton.planning.chain.search import analytic_seed, tapered
from baton.planning.chain.wavefront import chain_ttft, work_of
from baton.planning.cost_model import BATON, CostModel
from baton.planning.device_profile import DeviceProfile
from baton.planning.hardware import Hardware, ModelCosts
from baton.planning.local_prefill import LocalPrefill
from baton.planning.pace import Pace
from baton.planning.prefill_costs import PrefillCosts, ranks_s
from baton.results.prefill_trace import RankTiming
from baton.types import TokenRange

_SEARCHED_RANKS = 8
"""Maximum number of ranks for which knots (best partitions for some context lengths) are searched; a search for this
many ranks takes a second. For longer chains, a few partitions are compared by their predicted times."""
_CLOSE_RANKS = 4
"""Maximum number of ranks for which knots (best partitions for some context lengths) are close together: each knot has
twice the context length of the previous knot. Interpolation between such knots costs 1 or 2 % of speed. For more ranks,
each knot has four times the context length of the previous knot."""
_LEAST_KNOT = 16
_TINY_S = 1e-30
_STEPS_PER_OCTAVE = 8
"""Resolution of the factor by which messages between ranks take longer than predicted. Predictions are cached, and a
finer factor would change with each job."""
_FAR = 1.5
"""Factor, or its inverse, by which observed costs differ so much from nominal ones that the knots, which were searched
with nominal costs, are compared with other partitions."""
_FETCH_S = 0.004
"""Nominal fixed time in seconds of fetching cached KV: two calls, a connection, and opening files. Latency of the link
and transfer of bytes are not included."""


class ChainPlanner:
    """Predicts durations of prefill chains with up to `max_ranks` ranks, and of generation steps.

    Any thread may request predictions. Only one thread may call the methods that change them: `observe`,
    `observe_local`, `observe_fetch`, `pass_over_local` and `pass_over_fetch`.
    """

    def __init__(
        self,
        nominal: ModelCosts,
        *,
        max_ranks: int,
        max_tokens: int,
        local: LocalPrefill | None = None,
        table: PartitionTable | None = None,
        devices: frozenset[str] = frozenset(),
    ) -> None:
        """Create a planner whose predictions begin with the costs `nominal`. Search knots (best partitions for some
        context lengths) for prompts of up to `max_tokens` tokens. Longer prompts are partitioned in the same
        proportions as prompts of `max_tokens` tokens.

        `table`: knots of a planner with equal arguments; if given, nothing is searched. `local`: configuration of local
        prefill; if None, `local_s` returns None. `devices`: names of the device profiles (DeviceProfile) for which
        `nominal` is valid. Raises InvalidArgumentError if `max_ranks` or `max_tokens` is below 1.
        """
        for name, value in (("max_ranks", max_ranks), ("max_tokens", max_tokens)):
            if value < 1:
                raise InvalidArgumentError(f"{name} = {value} is out of range: use at least 1")
        self.nominal = nominal
        """Costs that are used until durations of jobs have been observed."""
        self.max_ranks = max_ranks
        self.max_tokens = max_tokens
        self.local = local
        """Configuration of local prefill by generation groups. None: local prefill is not predicted."""
        self.devices = devices
        """Names of the device profiles for which this planner was made."""
        self.table = self._searched() if table is None else table
        """Knots: best partitions for some context lengths."""
        self._num_searched = max(self.table.knots, default=1)
        self._others: dict[tuple[str, Hardware], ChainPlanner] = {}
        """Planners for other devices, by the device's name and rates."""
        self._rank_costs, self._local_costs = PrefillCosts(nominal.prefill), PrefillCosts(nominal.prefill)
        self._push_pace, self._fetch_pace, self._send_pace = Pace(), Pace(), Pace()
        self._send_factor = 1.0
        """Factor by which messages between ranks take longer than nominal."""
        self._costs: tuple[CostModel | None, CostModel] = None, nominal.prefill
        """Latest result of `_rank_costs`, and the same with the observed link between ranks."""

    @property
    def cost(self) -> CostModel:
        """Costs of prefill on a rank: the nominal ones, corrected by the observed durations of finished jobs."""
        learnt, (known, cost) = self._rank_costs.cost, self._costs
        if learnt is not known:
            cost = replace(learnt, link=learnt.link.times(self._send_factor)) if self._send_factor != 1 else learnt
            self._costs = learnt, cost
        return cost

    def for_device(self, profile: DeviceProfile) -> "ChainPlanner":
        """Return the planner for workers whose device has this profile.

        This planner is returned if it was made for this device (`devices`). Otherwise a planner with the nominal costs
        of the device is returned, which corrects them by what it observes of these workers. It compares a few
        partitions and searches none.
        """
        if profile.name in self.devices:
            return self
        key = profile.name, profile.hardware
        if key not in self._others:
            shape, size = self.nominal.shape, self.nominal.bytes_per_weight
            self._others[key] = ChainPlanner(
                ModelCosts.of(shape, profile.hardware, bytes_per_weight=size),
                max_ranks=self.max_ranks,
                max_tokens=self.max_tokens,
                local=None if self.local is None else replace(self.local, speed=1.0),
                table=PartitionTable({}),
            )
        return self._others[key]

    def _searched(self) -> PartitionTable:
        """Search the knots (best partitions for some context lengths) for the nominal costs.

        The context lengths of knots range from a few tokens to `max_tokens`. Each is a constant factor longer than the
        previous one.
        """
        contexts = {}
        for width in range(2, min(self.max_ranks, _SEARCHED_RANKS) + 1):
            least, longest = max(width, _LEAST_KNOT), max(width, self.max_tokens)
            factor = 2 if width <= _CLOSE_RANKS else 4
            powers = range(1 + int(math.log(longest / least, factor))) if longest > least else range(1)
            contexts[width] = [min(least, longest), *(longest // factor**power for power in powers)]
        return build_table(self.nominal.prefill, BATON, contexts)

    def observe(self, group: Hashable, ranks: Sequence[RankTiming]) -> None:
        """Record the durations that the ranks of `group` measured for a finished job. They correct all later
        predictions."""
        if not ranks:
            return
        link = self.nominal.prefill.link
        num_bytes = sum(rank.num_bytes_sent for rank in ranks)
        predicted_s = sum(rank.num_messages_sent for rank in ranks) * link.latency_s + num_bytes / link.bandwidth
        self._send_pace.note(sum(rank.send_s for rank in ranks), predicted_s)
        factor = 2 ** (round(_STEPS_PER_OCTAVE * math.log2(self._send_pace.factor)) / _STEPS_PER_OCTAVE)
        if factor != self._send_factor:
            self._send_factor, self._costs = factor, (None, self._costs[1])
        if num_bytes := sum(rank.num_bytes_pushed for rank in ranks):
            end_ns = max(rank.end_ns for rank in ranks)
            tail_s = max((max(rank.push_end_ns for rank in ranks) - end_ns) / 1e9 - link.latency_s, 0.0)
            run_s = (end_ns - min(rank.start_ns for rank in ranks)) / 1e9
            moved_s = min(tail_s * self.cost.num_layers, tail_s + run_s)  # tail_s: the larger part, as in `transfer_s`
            self._push_pace.note(moved_s, num_bytes / link.bandwidth)
        self._rank_costs.observe(group, ranks)

    def chunks(self, tokens: TokenRange, num_ranks: int) -> tuple[TokenRange, ...]:
        """Partition `tokens` into consecutive, non-empty ranges, one for each rank in rank order. Tokens before
        `tokens.start` are cached. If there are fewer tokens than ranks, return one range for each token.

        For few ranks and without cached tokens, the partition is interpolated between knots (best partitions for some
        context lengths). Otherwise this interpolated partition is compared with chunks of equal compute times, and the
        one with the shorter predicted time is returned. The comparison is necessary for three reasons: knots for many
        ranks are far apart, knots are searched without cached tokens, and they are searched with nominal costs. If
        cached tokens precede the chunks, the best chunks are more equal. If `num_ranks` exceeds the limit up to which
        knots are searched, or if messages take much longer than predicted, a few partitions for slow links are
        compared, too.

        Raises InvalidArgumentError if there are no tokens, or if `num_ranks` is not in 1 to `max_ranks`.
        """
        check_partition_request(tokens, num_ranks)
        if num_ranks > self.max_ranks:
            raise InvalidArgumentError(f"num_ranks = {num_ranks} is out of range: this planner has {self.max_ranks}")
        width = min(num_ranks, len(tokens))
        if width == 1:
            return (tokens,)
        cost = self.cost
        if not tokens.start and width <= min(_CLOSE_RANKS, self._num_searched) and not self._is_far(cost):
            return self.table.partition(tokens, width)
        shapes = np.array(self._shapes(tokens, width, cost), dtype=np.float64)
        times = chain_ttft(shapes, cost, BATON, cached=tokens.start)
        return as_ranges([int(chunk) for chunk in shapes[times.argmin()]], tokens.start)

    def ttft_s(self, chunks: Sequence[TokenRange]) -> float:
        """Return the predicted time to first token in seconds of an idle chain. `chunks` has one range of tokens for
        each rank."""
        lengths, cached = _lengths(chunks)
        return float(chain_ttft(lengths, self.cost, BATON, cached=cached))

    def rank_s(self, chunks: Sequence[TokenRange]) -> tuple[float, ...]:
        """Return the predicted compute time in seconds of each rank for all layers. Waits and other costs of a request
        are not included."""
        _lengths(chunks)
        return ranks_s(chunks, self.cost)

    def step_s(self, batch: float, context: float) -> float:
        """Return the predicted duration in seconds of a generation step with `batch` sequences of `context` tokens on
        average, according to nominal costs."""
        return self.nominal.step.plain_s(batch, context)

    def transfer_s(self, num_tokens: int, prefill_s: float, *, is_elsewhere: bool = False) -> float:
        """Return the predicted time in seconds from the end of a chain's computation until all KV of its `num_tokens`
        tokens has arrived at the generation group. `prefill_s` is the chain's compute time, during which most KV is
        already sent. `is_elsewhere` is True if no rank of the chain is on the group's node.

        The KV of the last layer is always sent after the computation. On a slow link, so is some KV of earlier layers.
        The time is computed from the link's nominal latency, and from its bandwidth as observed at earlier pushes or,
        before the first push, from its nominal bandwidth.
        """
        cost, link = self.nominal.prefill, self.nominal.prefill.link
        moved_s = self._push_pace.factor * num_tokens * cost.kv_bytes * cost.num_layers / link.bandwidth
        num_latencies = 3 if is_elsewhere else 1  # to another node, also the last piece there, and the answer back
        return num_latencies * link.latency_s + max(moved_s / cost.num_layers, moved_s - prefill_s)

    def alone_s(self, tokens: TokenRange) -> float | None:
        """Return the predicted time in seconds in which a generation group computes `tokens` itself while no other
        sequences run. Tokens before `tokens.start` are cached. The costs follow from the durations that `observe_local`
        has recorded; before the first record, they are those of a prefill rank. Returns None if `local` is None."""
        if self.local is None:
            return None
        costs = self._local_costs.cost if len(self._local_costs) else self.cost
        return sum(ranks_s((tokens,), costs)) / self.local.speed

    def local_s(self, tokens: TokenRange, step_s: float, alone_s: float | None = None) -> tuple[float, float] | None:
        """Return two predicted durations in seconds of a local prefill, in which a generation group computes `tokens`
        itself.

        The first is the duration of the prompt's computation. The second is the total duration of the decode steps of
        other sequences. The prompt has to wait for these steps.

        Tokens before `tokens.start` are cached. `step_s` is the predicted duration of a decode step of the other
        sequences; 0 if there are none. `alone_s` is the result of the method `alone_s` for the same tokens; pass it if
        it is known, because computing it takes most of the time of this call. Returns None if `local` is None.
        """
        prefill_s = self.alone_s(tokens) if alone_s is None else alone_s
        if self.local is None or prefill_s is None:
            return None
        return prefill_s, self.local.steps_s(prefill_s, len(tokens), step_s)

    def observe_local(self, tokens: TokenRange, seconds: float) -> None:
        """Record that a generation group computed `tokens` of a prompt itself in `seconds`, without the decode steps of
        other sequences."""
        if self.local is not None:
            self._local_costs.note((tokens,), 0, seconds * self.local.speed)

    def pass_over_local(self) -> None:
        """Record that a prefill chain was predicted to be faster than a local prefill by a generation group. After many
        such decisions in a row, observations of local prefills are dropped one by one, so that local prefill is tried
        again."""
        self._local_costs.pass_over()

    def fetch_s(self, num_tokens: int, *, is_far: bool) -> float:
        """Return the predicted time in seconds of fetching the cached KV of `num_tokens` tokens from a prefix store.
        `is_far` is True if the store is on another node. The time is computed from the link's nominal bandwidth and
        latency, and multiplied by the factor by which earlier fetches took longer than predicted."""
        num_bytes = num_tokens * self.cost.kv_bytes * self.cost.num_layers
        return self._fetch_pace.factor * self._nominal_fetch_s(num_bytes, is_far=is_far)

    def observe_fetch(self, num_bytes: int, observed_s: float, *, is_far: bool) -> None:
        """Record that fetching `num_bytes` bytes of cached KV took `observed_s` seconds. `is_far` is True if the KV was
        on another node."""
        self._fetch_pace.note(observed_s, self._nominal_fetch_s(num_bytes, is_far=is_far))

    def pass_over_fetch(self) -> None:
        """Record that a fetch of cached KV was possible, but that computing the KV was predicted to be faster. After
        many such decisions in a row, observations of fetches are dropped one by one, so that fetching is tried
        again."""
        self._fetch_pace.pass_over()

    def _nominal_fetch_s(self, num_bytes: int, *, is_far: bool) -> float:
        link = self.nominal.prefill.link
        return _FETCH_S + (2 * link.latency_s if is_far else 0.0) + num_bytes / link.bandwidth

    def layer_s(self, chunks: Sequence[TokenRange]) -> float:
        """Return the duration in seconds of the longest single operation of a layer in the chain. An operation is the
        computation of a layer on one rank, or a message on a link. A chain that makes no progress for much longer than
        this duration has stalled."""
        lengths, cached = _lengths(chunks)
        cost = self.cost
        work = work_of(np.array([lengths], dtype=np.float64), cost, BATON, cached)
        message_s = cost.link.seconds(sum(lengths[:-1]) * cost.kv_bytes) if len(lengths) > 1 else 0.0
        return max(float(work.layer.max()), cost.issue_s, message_s)

    def _shapes(self, tokens: TokenRange, width: int, cost: CostModel) -> list[tuple[int, ...]]:
        """Return the partitions to compare when no knot is close."""
        num_tokens = len(tokens)
        balanced = analytic_seed(num_tokens, width, cost, BATON.kernel, cached=tokens.start)
        shapes = [balanced]
        if width <= self._num_searched:
            shapes.append(tuple(len(each) for each in self.table.partition(tokens, width)))
        if width > self._num_searched or self._send_factor > _FAR:
            shapes += tapered(num_tokens, width)
        return shapes

    def _is_far(self, cost: CostModel) -> bool:
        """Return True if another partition than the knots may be better with `cost`."""
        changes = self._send_factor, _ratio(cost) / _ratio(self.nominal.prefill)
        return not all(1 / _FAR <= change <= _FAR for change in changes)


def _ratio(cost: CostModel) -> float:
    """Return the cost of a pair of tokens, relative to that of a token."""
    return max(cost.pair_s, _TINY_S) / max(cost.linear_s, _TINY_S)


def _lengths(chunks: Sequence[TokenRange]) -> tuple[tuple[int, ...], int]:
    """Return the tokens of each chunk, and the tokens cached before the first."""
    if not chunks:
        raise InvalidArgumentError("chunks is empty: give at least one range")
    return tuple(len(each) for each in chunks), chunks[0].start
