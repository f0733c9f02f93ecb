"""Compares the ways to serve a request: which generation group, and which workers prefill, in predicted seconds.

A way is a generation group and, to prefill, a prefill group's chain or the generation group itself; its cost is the sum
of `baton.results.prefill_trace.PlacementTerms`, which `orchestrator.placement.predictions` predicts. The comparisons
here are called by `orchestrator.placement.chooser`. The cost of a local prefill to running rows is bounded by their
engine (`generate_workers.engine.step_bound`), and is no term. Pure.
"""

from collections.abc import Callable, Collection, Hashable, Iterable
from dataclasses import dataclass

from baton.results.prefill_trace import Placement, PlacementTerms
from orchestrator.membership.loads import Load
from orchestrator.membership.view import ClusterView, GenerationGroup, PrefillGroup
from orchestrator.placement.block_fetches import BlockFetch
from orchestrator.placement.chain_width import ChainPlan
from orchestrator.requests.record import RequestRecord

LoadOf = Callable[[str], Load]
"""A function from a group's name to its load."""

_ALIKE_S = 1e-3
"""Costs are compared in units of this many seconds; of groups with equal costs the one with the most room is chosen."""


@dataclass(frozen=True)
class ChainWay:
    """A request's chain in a prefill group, as one way to prefill it, and its predicted terms."""

    group: PrefillGroup
    chain: ChainPlan
    terms: PlacementTerms
    fetch: BlockFetch | None = None
    """Cached KV that is fetched to the chain's node before, and behind which the chain begins; None if none is."""


@dataclass(frozen=True)
class LocalWay:
    """A prefill by the generation group itself, as one way, and its predicted terms."""

    terms: PlacementTerms
    fetch: BlockFetch | None = None
    """Cached KV that is fetched to the group's node before, and behind which the group begins; None if none is."""


def able_groups(view: ClusterView, record: RequestRecord, avoid: Collection[Hashable] = ()) -> list[GenerationGroup]:
    """Return the ready generation groups outside `avoid` that may serve the request and have slots for it."""
    return [
        group
        for group in view.generation
        if group.ready and group.incarnation not in avoid and could_serve(group, record)
    ]


def could_serve(group: GenerationGroup, record: RequestRecord) -> bool:
    """Return whether the group may serve the request once it is ready, and its slots are large enough."""
    is_allowed = group.may_serve(exact=record.request.exact)
    return is_allowed and group.max_slot_tokens >= record.request.capacity_tokens


def groups_with_room(groups: Iterable[GenerationGroup], load_of: LoadOf, num_slots: int) -> list[GenerationGroup]:
    """Return the groups that have so many free slots now, as far as this orchestrator has given them away."""
    return [group for group in groups if load_of(group.name).num_slots + num_slots <= group.num_slots]


def cheapest_group(
    groups: Collection[GenerationGroup], load_of: LoadOf, cost_of: Callable[[GenerationGroup], float]
) -> GenerationGroup | None:
    """Return the group of least cost; None without groups. A group without an alternative is not asked for its cost.

    Of groups with nearly equal costs, takes the one with the most free slots; of equals, the first.
    """
    if len(groups) < 2:
        return next(iter(groups), None)
    return min(groups, key=lambda group: (cost_of(group) // _ALIKE_S, load_of(group.name).num_slots - group.num_slots))


def cheapest_chain(ways: Iterable[ChainWay]) -> ChainWay | None:
    """Return the way of least cost, to its own prompt and to others together; of equals the first, and None of none."""
    return min(ways, key=lambda way: way.terms.cost_s, default=None)


def compare(chain: PlacementTerms, local: PlacementTerms | None) -> Placement:
    """Return the decision whether the chain or the generation group prefills: the chain, unless the group is faster."""
    if local is None:
        return Placement("not_predicted", chain)
    return Placement("local_faster" if local.cost_s < chain.cost_s else "chain_faster", chain, local)
