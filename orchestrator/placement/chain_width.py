"""Plans a prompt's chain in a prefill group: which ranks, how the prompt is divided among them, and when its turn is.

Compares several widths (all of them while they are few, then some of each size, and each width beyond which the next
rank has more to do) and takes the one of least cost, in seconds of predicted time to first token over all prompts:

    own      the jobs that its ranks serve first, and then the prompt's own time on a chain of that width
    others   how much later the jobs that they serve after it are done; and, for as many more prompts as there are jobs
             in flight, what this width computes beyond the most economical one, spread over the group

A job's turn is `due_s`: its arrival plus the time that it would take alone. Overtaking is bounded: a job is promised,
when it comes, to be done within (1 + overtaking) times its predicted time, and a job that would break a promise goes
behind the job that has it. Whatever is due or promised, a job gives way to a job of another tenant that has less in
flight, for its weight, than this job's own tenant has before it. docs/kv_runahead.md derives these rules.

Called by `orchestrator.placement.predictions`. `baton.planning.planner` predicts, and
`orchestrator.membership.prefill_queues` holds the jobs in flight. Pure.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import pairwise

from baton.planning.planner import ChainPlanner
from baton.results.prefill_trace import WidthChoice, WidthOption
from baton.types import Rank, TokenRange
from orchestrator.membership.prefill_queues import Pending
from orchestrator.requests.tenants import DEFAULT_TENANT, Tenant


@dataclass(frozen=True)
class ChainPlan:
    """The plan of one prompt's chain: ranks, chunks, turn and predictions."""

    ranks: tuple[Rank, ...]
    """Ranks of the group that compute the chain, ascending."""
    chunks: tuple[TokenRange, ...]
    """Token ranges of the prompt, one per rank."""
    layer_s: float
    """Predicted seconds of the longest layer of any rank."""
    job: Pending
    """The entry for the book of jobs: the chain's turn and its predicted work on each rank."""
    choice: WidthChoice
    """The predictions for this width and for the other widths compared."""
    ttft_s: float
    """Predicted seconds of the chain on idle ranks."""

    @property
    def num_cached_tokens(self) -> int:
        """Return the number of tokens before the chain's first token; their KV is cached."""
        return self.chunks[0].start

    @property
    def cost_s(self) -> float:
        """Return the predicted seconds of the chain and of its delay to other prompts together."""
        return min(option.cost_s for option in self.choice.options)


@dataclass(frozen=True)
class _Shape:
    """The shape of a prompt's chain of one width, and the planner's predictions for it on idle ranks."""

    chunks: tuple[TokenRange, ...]
    rank_s: tuple[float, ...]
    ttft_s: float


@dataclass(frozen=True)
class _PlacedChain:
    """A chain at a place among the jobs of a group."""

    shape: _Shape
    ranks: tuple[Rank, ...]
    num_ahead: int
    """Number of jobs that are served before the chain."""
    own_s: float
    others_s: float


@dataclass(frozen=True)
class WidthPolicy:
    """Plans chains under one policy."""

    planner: ChainPlanner
    _: KW_ONLY
    elastic: bool
    """Whether ranks and turns go by cost; False gives every prompt all ranks, first come first served."""
    overtaking: float
    """Extra time that a job may take for the sake of later jobs, as a part of its predicted time."""

    def chains(self, tokens: TokenRange, tenant: Tenant = DEFAULT_TENANT) -> "PromptChains":
        """Return the chains of a tenant's prompt, to be planned for any groups."""
        return PromptChains(self, tokens, tenant)


class PromptChains:
    """One prompt's chains of any width, each predicted once, as that takes longer than all the rest."""

    def __init__(self, policy: WidthPolicy, tokens: TokenRange, tenant: Tenant) -> None:
        self._policy, self._planner, self._tokens, self._tenant = policy, policy.planner, tokens, tenant
        self._shapes: dict[int, _Shape] = {}
        """Shapes predicted so far, by width."""
        self._layers_s: dict[int, float] = {}
        """Predicted seconds of the longest layer of any rank, by width, as far as chains were planned."""

    def plan(self, num_ranks: int, pending: Sequence[Pending], now_s: float) -> ChainPlan:
        """Return the chain for a group of `num_ranks` with these jobs in flight, in serving order. `now_s` is on the
        orchestrator's monotonic clock. Deterministic."""
        elastic = self._policy.elastic
        most = min(num_ranks, len(self._tokens), self._planner.max_ranks)
        spaced = spaced_widths(most) if elastic else {most}
        due_s = now_s + (min(self._shape(width).ttft_s for width in spaced) if elastic else 0.0)
        yielding = give_way(pending, self._tenant) if elastic else [False] * len(pending)
        group = _Group(num_ranks, pending, yielding, now_s, due_s)
        widths = sorted(spaced | group.edges(most)) if elastic else [most]
        shapes = [self._shape(width) for width in widths]
        least_s = min(sum(shape.rank_s) for shape in shapes)
        places = [group.place(shape, sum(shape.rank_s) - least_s) for shape in shapes]
        best = min(places, key=lambda place: place.own_s + place.others_s)  # of equals the narrowest
        due_s = max([due_s, *(job.due_s for job in pending[: best.num_ahead])])
        if best.num_ahead < len(pending):  # jobs that give way may be due earlier
            due_s = min(due_s, math.nextafter(pending[best.num_ahead].due_s, -math.inf))
        latest_s = now_s + best.own_s * (1 + self._policy.overtaking)
        return ChainPlan(
            ranks=best.ranks,
            chunks=best.shape.chunks,
            layer_s=self._layer_s(best.shape.chunks),
            job=Pending(due_s, latest_s, dict(zip(best.ranks, best.shape.rank_s, strict=True)), self._tenant),
            choice=WidthChoice(
                width=len(best.ranks),
                num_ranks=num_ranks,
                num_ahead=best.num_ahead,
                num_jobs=len(pending),
                options=tuple(WidthOption(len(each.ranks), each.own_s, each.others_s) for each in places),
            ),
            ttft_s=best.shape.ttft_s,
        )

    def _shape(self, width: int) -> _Shape:
        if width not in self._shapes:
            chunks = self._planner.chunks(self._tokens, width)
            self._shapes[width] = _Shape(chunks, self._planner.rank_s(chunks), self._planner.ttft_s(chunks))
        return self._shapes[width]

    def _layer_s(self, chunks: tuple[TokenRange, ...]) -> float:
        width = len(chunks)
        if width not in self._layers_s:
            self._layers_s[width] = self._planner.layer_s(chunks)
        return self._layers_s[width]


class _Group:
    """A group's jobs in flight at one moment, some of them `yielding`, and the places for a new job due at `due_s`."""

    def __init__(
        self, num_ranks: int, pending: Sequence[Pending], yielding: Sequence[bool], now_s: float, due_s: float
    ) -> None:
        self._pending = pending
        self._yielding = yielding
        self._now_s = now_s
        self._num_earlier = self._num_before(sum(job.due_s <= due_s for job in pending))
        self._finish_s = finishes_s(job.left_s for job in pending)
        earlier_s = busy_s(job.left_s for job in pending[: self._num_earlier])
        all_s = busy_s(job.left_s for job in pending)
        self._ranks = sorted(map(Rank, range(num_ranks)), key=lambda rank: (earlier_s[rank], all_s[rank], rank))
        """All ranks, the one that is free first leading; of equals, the one with least to do."""
        self._busy_s = [(earlier_s[rank], all_s[rank]) for rank in self._ranks]

    def edges(self, most: int) -> set[int]:
        """Return the widths, up to `most`, beyond which the next rank has more to do, so that costs jump there."""
        steps = enumerate(pairwise(self._busy_s), start=1)
        return {width for width, (last, following) in steps if width <= most and last != following}

    def place(self, shape: _Shape, extra_s: float) -> _PlacedChain:
        """Return the chain's place and costs; `extra_s` are its rank-seconds beyond the most economical chain's."""
        pending, ranks = self._pending, tuple(sorted(self._ranks[: len(shape.chunks)]))
        own_left_s = dict(zip(ranks, shape.rank_s, strict=True))
        num_ahead = self._num_earlier
        delays_s = self._delays_s(own_left_s, num_ahead)
        for index, delay_s in enumerate(delays_s, start=num_ahead):
            is_late = delay_s > 0 and self._now_s + self._finish_s[index] + delay_s > pending[index].latest_s
            if is_late and not self._yielding[index]:
                num_ahead = index + 1
        num_ahead = self._num_before(num_ahead)
        ahead_s = busy_s(job.left_s for job in pending[:num_ahead])
        return _PlacedChain(
            shape=shape,
            ranks=ranks,
            num_ahead=num_ahead,
            own_s=max(ahead_s[rank] for rank in ranks) + shape.ttft_s,
            others_s=sum(self._delays_s(own_left_s, num_ahead)) + len(pending) * extra_s / len(self._ranks),
        )

    def _num_before(self, num_ahead: int) -> int:
        """Return how many jobs are served before a new job that would come after the first `num_ahead`.

        Jobs at the end of these that give way are passed, and every job due no later than the last of the others
        counts.
        """
        while num_ahead and self._yielding[num_ahead - 1]:
            num_ahead -= 1
        return sum(job.due_s <= self._pending[num_ahead - 1].due_s for job in self._pending) if num_ahead else 0

    def _delays_s(self, own_left_s: Mapping[Rank, float], num_ahead: int) -> list[float]:
        """Return how much later each job behind the first `num_ahead` is done because of the new job, in seconds."""
        lefts_s = [job.left_s for job in self._pending]
        after_s = finishes_s([*lefts_s[:num_ahead], own_left_s, *lefts_s[num_ahead:]])[num_ahead + 1 :]
        return [after - before for after, before in zip(after_s, self._finish_s[num_ahead:], strict=True)]


def give_way(pending: Sequence[Pending], tenant: Tenant) -> list[bool]:
    """Return for each job whether it lets a new job of `tenant` pass, whenever either is due.

    A job does so when its own tenant has more work before it than `tenant` has in flight, both in predicted seconds
    divided by the tenant's weight.
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
    """Return the widths to compare on an idle group: all while they are few, then four from a power of two to the next,
    where costs hardly change in between, and `most`."""
    return {width for width in range(1, most) if width % (1 << max(width.bit_length() - 3, 0)) == 0} | {most}


def finishes_s(lefts_s: Iterable[Mapping[Rank, float]]) -> list[float]:
    """Return the seconds until each job is done, when every rank works through its parts in this order."""
    busy: defaultdict[Rank, float] = defaultdict(float)
    finishes = []
    for left_s in lefts_s:
        for rank, seconds in left_s.items():
            busy[rank] += seconds
        finishes.append(max((busy[rank] for rank in left_s), default=0.0))
    return finishes


def busy_s(lefts_s: Iterable[Mapping[Rank, float]]) -> Mapping[Rank, float]:
    """Return the seconds of work that each rank has; 0 for a rank without any."""
    busy: defaultdict[Rank, float] = defaultdict(float)
    for left_s in lefts_s:
        for rank, seconds in left_s.items():
            busy[rank] += seconds
    return busy
