"""Plans how a prefill group computes a prompt: which ranks form the chain, how the prompt is divided among the ranks,
and when the chain is served.

The width of a chain is its number of ranks. If a group has few ranks, all widths are compared. Otherwise only some are
compared: spaced ones (`spaced_widths`), and each width at which a further rank would have more queued work than the
ranks of the chain. The width with the least cost is selected. The cost is the sum of two terms, in seconds of
predicted time to first token:

    own      Time of the jobs that the chain's ranks serve before it, plus the time of the chain itself.
    others   Delay of all jobs served after the chain, plus a charge for the additional work of this width. The charge
             is J * W / R, where J is the number of unfinished jobs of the group, W the rank-seconds of this width
             minus the least rank-seconds of any compared width, and R the number of ranks of the group.

Jobs are served in the order of `due_s`, which is the arrival time plus the predicted time on idle ranks. Overtaking is
limited. When a job arrives, it gets a latest end: its arrival time plus (1 + overtaking) times its predicted time to
first token. If a later job would delay a waiting job beyond the waiting job's latest end, the later job is served after
the waiting job.

Tenants are served fairly. Let A be the tenant of a waiting job, and B the tenant of a new job. Two amounts of work are
compared, each divided by the weight of its tenant: the work of A's jobs that are served before the waiting job, and the
work of all unfinished jobs of B. If the first is larger, the waiting job yields to the new job. This rule overrides due
times and latest ends. docs/kv_runahead.md derives these rules.

Called by `orchestrator.placement.options`. Durations are predicted by `baton.planning.planner`. The unfinished jobs
are listed in `orchestrator.membership.prefill_queues`. Does no I/O.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from baton.planning.planner import ChainPlanner
from baton.results.prefill_trace import WidthChoice, WidthOption
from baton.types import Rank, TokenRange
from orchestrator.membership.prefill_queues import Pending
from orchestrator.requests.config import OrchestratorConfig
from orchestrator.requests.tenants import DEFAULT_TENANT, Tenant


@dataclass(frozen=True)
class ChainPlan:
    """Plan for the prefill of one prompt by a chain of ranks: the ranks, their chunks, the position in the queue, and
    predictions."""

    ranks: tuple[Rank, ...]
    """Ranks of the group that run the chain, in ascending order."""
    chunks: tuple[TokenRange, ...]
    """Range of prompt tokens that each rank computes, in the order of `ranks`."""
    job: Pending
    """Entry for the group's queue of unfinished jobs. It has the chain's due time and its predicted work on each
    rank."""
    choice: WidthChoice
    """Selected number of ranks, and the predictions for each number of ranks that was compared."""
    ttft_s: float
    """Predicted duration of the chain in seconds if all its ranks are idle."""
    planner: ChainPlanner
    """Planner of the device of the ranks."""

    @property
    def layer_s(self) -> float:
        """Return the predicted duration in seconds of the slowest layer of any rank. It is computed when it is read,
        because it is read only for the chain that is selected."""
        return self.planner.layer_s(self.chunks)

    @property
    def num_cached_tokens(self) -> int:
        """Return the number of leading prompt tokens whose KV is cached. The chain starts after these tokens."""
        return self.chunks[0].start

    @property
    def cost_s(self) -> float:
        """Return the cost of the chain in seconds: its predicted duration plus the delay that it causes to other
        prompts."""
        return min(option.cost_s for option in self.choice.options)


@dataclass(frozen=True)
class _Shape:
    """Division of a prompt among a number of ranks, and the predicted durations on idle ranks."""

    chunks: tuple[TokenRange, ...]
    rank_s: tuple[float, ...]
    ttft_s: float


@dataclass(frozen=True)
class _PlacedChain:
    """Possible chain for a prompt, with its ranks, its position in the group's queue and its costs."""

    shape: _Shape
    ranks: tuple[Rank, ...]
    num_ahead: int
    """Number of the group's unfinished jobs that are served before the chain."""
    own_s: float
    others_s: float


class PromptChains:
    """Plans the prefill of one prompt by a chain of ranks, in any group. Predicts each chain length (width) once and
    reuses the result, because predictions take most of the time."""

    def __init__(
        self, planner: ChainPlanner, config: OrchestratorConfig, tokens: TokenRange, tenant: Tenant = DEFAULT_TENANT
    ) -> None:
        """Create a planner of chains for the tokens `tokens` of a prompt of `tenant`. `planner` is that of the ranks'
        device."""
        self._planner, self._config, self._tokens, self._tenant = planner, config, tokens, tenant
        self._shapes: dict[int, _Shape] = {}
        """Cached divisions of the prompt with their predicted durations, by number of ranks."""

    def plan(self, num_ranks: int, pending: Sequence[Pending], now_s: float) -> ChainPlan:
        """Return the best chain for the prompt in a group of `num_ranks` ranks. `pending` are the group's unfinished
        jobs, in the order of service. `now_s` is the time in seconds on the orchestrator's monotonic clock.
        Deterministic."""
        elastic = self._config.elastic
        most = min(num_ranks, len(self._tokens), self._planner.max_ranks)
        spaced = spaced_widths(most) if elastic else {most}
        due_s = now_s + (min(self._shape(width).ttft_s for width in spaced) if elastic else 0.0)
        yielding = give_way(pending, self._tenant) if elastic else [False] * len(pending)
        group = _Group(num_ranks, pending, yielding, now_s, due_s)
        widths = sorted(spaced | group.edges(most)) if elastic else [most]
        shapes = [self._shape(width) for width in widths]
        least_s = min(sum(shape.rank_s) for shape in shapes)
        places = [group.place(shape, sum(shape.rank_s) - least_s) for shape in shapes]
        best = min(places, key=lambda place: place.own_s + place.others_s)  # on ties the narrowest
        due_s = max([due_s, *(job.due_s for job in pending[: best.num_ahead])])
        if best.num_ahead < len(pending):  # jobs that give way may be due earlier
            due_s = min(due_s, math.nextafter(pending[best.num_ahead].due_s, -math.inf))
        latest_s = now_s + best.own_s * (1 + self._config.overtaking)
        return ChainPlan(
            ranks=best.ranks,
            chunks=best.shape.chunks,
            job=Pending(due_s, latest_s, dict(zip(best.ranks, best.shape.rank_s, strict=True)), self._tenant),
            choice=WidthChoice(
                width=len(best.ranks),
                num_ranks=num_ranks,
                num_ahead=best.num_ahead,
                num_jobs=len(pending),
                options=tuple(WidthOption(len(each.ranks), each.own_s, each.others_s) for each in places),
            ),
            ttft_s=best.shape.ttft_s,
            planner=self._planner,
        )

    def _shape(self, width: int) -> _Shape:
        if width not in self._shapes:
            chunks = self._planner.chunks(self._tokens, width)
            self._shapes[width] = _Shape(chunks, self._planner.rank_s(chunks), self._planner.ttft_s(chunks))
        return self._shapes[width]


class _Group:
    """Queue of one prefill group at one moment. Finds the position and the cost of a new job with due time `due_s`. For
    each pending job, `yielding` is True if the pending job yields to the new job."""

    def __init__(
        self, num_ranks: int, pending: Sequence[Pending], yielding: Sequence[bool], now_s: float, due_s: float
    ) -> None:
        self._pending = pending
        self._yielding = yielding
        self._now_s = now_s
        self._num_earlier = self._num_before(sum(job.due_s <= due_s for job in pending))
        _, earlier_s = finishes_s(job.left_s for job in pending[: self._num_earlier])
        self._finish_s, all_s = finishes_s(job.left_s for job in pending)
        self._ranks = sorted(map(Rank, range(num_ranks)), key=lambda rank: (earlier_s[rank], all_s[rank], rank))
        """All ranks of the group, in the order in which they become free. Of ranks that become free at the same time,
        the one with less work comes first."""
        self._busy_s = [(earlier_s[rank], all_s[rank]) for rank in self._ranks]

    def edges(self, most: int) -> set[int]:
        """Return the widths (numbers of ranks), up to `most`, beyond which the cost of a chain rises abruptly. The next
        rank that such a chain would use becomes free later, or has more work, than the chain's last rank."""
        steps = enumerate(pairwise(self._busy_s), start=1)
        return {width for width, (last, following) in steps if width <= most and last != following}

    def place(self, shape: _Shape, extra_s: float) -> _PlacedChain:
        """Return the chain with its position in the queue and its costs. `extra_s` is the work of this chain, in
        rank-seconds, minus the least work of any chain that is compared."""
        pending, ranks = self._pending, tuple(sorted(self._ranks[: len(shape.chunks)]))
        own_left_s = dict(zip(ranks, shape.rank_s, strict=True))
        num_ahead = self._num_earlier
        delays_s = self._delays_s(own_left_s, num_ahead)
        for index, delay_s in enumerate(delays_s, start=num_ahead):
            is_late = delay_s > 0 and self._now_s + self._finish_s[index] + delay_s > pending[index].latest_s
            if is_late and not self._yielding[index]:
                num_ahead = index + 1
        num_ahead = self._num_before(num_ahead)
        _, ahead_s = finishes_s(job.left_s for job in pending[:num_ahead])
        return _PlacedChain(
            shape=shape,
            ranks=ranks,
            num_ahead=num_ahead,
            own_s=max(ahead_s[rank] for rank in ranks) + shape.ttft_s,
            others_s=sum(self._delays_s(own_left_s, num_ahead)) + len(pending) * extra_s / len(self._ranks),
        )

    def _num_before(self, num_ahead: int) -> int:
        """Return how many jobs are served before a new job that should follow the first `num_ahead` jobs.

        Jobs at the end of the first `num_ahead` are skipped if they yield. Then every job that is due no later than the
        last remaining one is counted.
        """
        while num_ahead and self._yielding[num_ahead - 1]:
            num_ahead -= 1
        return sum(job.due_s <= self._pending[num_ahead - 1].due_s for job in self._pending) if num_ahead else 0

    def _delays_s(self, own_left_s: Mapping[Rank, float], num_ahead: int) -> list[float]:
        """Return the delay in seconds that the new job causes to each job after the first `num_ahead` jobs."""
        lefts_s = [job.left_s for job in self._pending]
        after_s, _ = finishes_s([*lefts_s[:num_ahead], own_left_s, *lefts_s[num_ahead:]])
        pairs = zip(after_s[num_ahead + 1 :], self._finish_s[num_ahead:], strict=True)
        return [after - before for after, before in pairs]


def give_way(pending: Sequence[Pending], tenant: Tenant) -> list[bool]:
    """Return, for each pending job, True if it yields to a new job of `tenant`, i.e. if the new job may be served first
    regardless of due times.

    A pending job never yields to a job of its own tenant. Otherwise let `before` be the work of the pending job's
    tenant that is queued ahead of the job. The job yields if `before` exceeds all queued work of `tenant`. Work is
    measured in predicted seconds, divided by the weight of its tenant.
    """
    own_s = sum(sum(job.left_s.values()) for job in pending if job.tenant.name == tenant.name) / tenant.weight
    before_s: defaultdict[str, float] = defaultdict(float)
    yielding = []
    for job in pending:
        name = job.tenant.name
        yielding.append(name != tenant.name and before_s[name] > own_s)
        before_s[name] += sum(job.left_s.values()) / job.tenant.weight
    return yielding


def spaced_widths(most: int) -> set[int]:
    """Return the numbers of ranks (widths) to compare on an idle group of `most` ranks: all small widths, four widths
    between each power of two and the next, and `most`. Costs change little between these widths."""
    return {width for width in range(1, most) if width % (1 << max(width.bit_length() - 3, 0)) == 0} | {most}


def finishes_s(lefts_s: Iterable[Mapping[Rank, float]]) -> tuple[list[float], Mapping[Rank, float]]:
    """Return, for each job, the seconds until it ends, if every rank serves the jobs in the given order, and the total
    seconds of work of each rank, which are 0 for ranks without work. `lefts_s` has the remaining seconds of work by
    rank for each job."""
    busy: defaultdict[Rank, float] = defaultdict(float)
    finishes = []
    for left_s in lefts_s:
        for rank, seconds in left_s.items():
            busy[rank] += seconds
        finishes.append(max((busy[rank] for rank in left_s), default=0.0))
    return finishes, busy
