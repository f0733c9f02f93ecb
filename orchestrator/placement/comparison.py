"""Compares the options to serve a request (which generation group, and which workers prefill) by predicted seconds.

An option is a generation group together with either a prefill group's chain or a prefill by the generation group
itself. Its cost is the sum of `baton.results.prefill_trace.PlacementTerms`, predicted by
`orchestrator.placement.predictions`. The comparisons are called by `orchestrator.placement.chooser`. The delay that a
local prefill causes to running sequences is limited by their engine (`generate_workers.engine.step_bound`), so it is
not a term of the cost. Pure.
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
"""Function that returns the load of the group of a given name."""

_ALIKE_S = 1e-3
"""Resolution in seconds for comparing costs. Among groups with equal costs, the group with the most free slots is
selected."""


@dataclass(frozen=True)
class ChainWay:
    """Option to prefill a request by a chain in a prefill group, with its predicted terms."""

    group: PrefillGroup
    chain: ChainPlan
    terms: PlacementTerms
    fetch: BlockFetch | None = None
    """Cached KV that is first fetched to the chain's node. The chain starts after it. None if there is no fetch."""


@dataclass(frozen=True)
class LocalWay:
    """Option to prefill a request by the generation group itself, with its predicted terms."""

    terms: PlacementTerms
    fetch: BlockFetch | None = None
    """Cached KV that is first fetched to the group's node. The prefill starts after it. None if there is no fetch."""


def able_groups(view: ClusterView, record: RequestRecord, avoid: Collection[Hashable] = ()) -> list[GenerationGroup]:
    """Return the ready generation groups that may serve the request and have large enough slots. Groups whose
    incarnation is in `avoid` are excluded."""
    return [
        group
        for group in view.generation
        if group.ready and group.incarnation not in avoid and could_serve(group, record)
    ]


def could_serve(group: GenerationGroup, record: RequestRecord) -> bool:
    """Return True if the group may serve the request once it is ready, and its slots are large enough."""
    is_allowed = group.may_serve(exact=record.request.exact)
    return is_allowed and group.max_slot_tokens >= record.request.capacity_tokens


def groups_with_room(groups: Iterable[GenerationGroup], load_of: LoadOf, num_slots: int) -> list[GenerationGroup]:
    """Return the groups with at least `num_slots` free slots, as far as this orchestrator knows."""
    return [group for group in groups if load_of(group.name).num_slots + num_slots <= group.num_slots]


def cheapest_group(
    groups: Collection[GenerationGroup], load_of: LoadOf, cost_of: Callable[[GenerationGroup], float]
) -> GenerationGroup | None:
    """Return the group with the least cost; None if there are no groups. If there is only one group, its cost is not
    computed.

    Among groups with nearly equal costs, the group with the most free slots is returned, on ties the first.
    """
    if len(groups) < 2:
        return next(iter(groups), None)
    return min(groups, key=lambda group: (cost_of(group) // _ALIKE_S, load_of(group.name).num_slots - group.num_slots))


def compare(chain: PlacementTerms, local: PlacementTerms | None) -> Placement:
    """Return whether the chain or the generation group should prefill: the chain, unless the group is predicted to be
    faster."""
    if local is None:
        return Placement("not_predicted", chain)
    return Placement("local_faster" if local.cost_s < chain.cost_s else "chain_faster", chain, local)
