"""Compares the ways to serve a request: which generation group, and which workers prefill, in predicted seconds.

A way to serve a request is a generation group and, to prefill it, a prefill group's chain or the generation group
itself. The terms of a way (`baton.results.PlacementTerms`) are the work queued before it, its own prefill without what
is cached there, the decode steps in between, the transfer of KV that the group lacks, and its cost to other prompts.
`orchestrator.placement.predictions` predicts them; `orchestrator.placement.chooser` calls the comparisons here. The
cost of a local prefill to running rows is bounded by their engine (`generate_workers.engine.step_bound`), and is no
term. Pure.
"""

from collections.abc import Callable, Collection
from typing import TypeVar

from baton.results import Placement, PlacementTerms
from orchestrator.membership.members import ClusterView, GenerationGroup, Load, PrefillGroup
from orchestrator.placement.chain_width import ChainPlan
from orchestrator.requests.record import RequestRecord

T = TypeVar("T")
Choose = Callable[[Collection[object]], T | None]
"""A function from the lives of groups to avoid to the present choice; None for no choice."""
Chain = tuple[ChainPlan, PlacementTerms]
"""A request's chain in a prefill group, and its predicted terms."""
ChainFor = Callable[[PrefillGroup], Chain]
"""A function from a prefill group to the request's chain there at present."""
LoadOf = Callable[[str], Load]
"""A function from a group's name to its load."""
CostOf = Callable[[GenerationGroup], float]
"""A function from a group to the predicted seconds of the best way there."""

_ALIKE_S = 1e-3
"""Costs are compared in units of this many seconds; of groups with equal costs the one with the most room is chosen."""


def choose_generation(
    view: ClusterView,
    load_of: LoadOf,
    record: RequestRecord,
    avoid: Collection[object],
    cost_of: CostOf = lambda group: 0.0,
) -> GenerationGroup | None:
    """Return the ready generation group where the request costs least; None when no group has room now.

    Considers groups that may serve the request, have enough free slots and large enough ones, and are not in `avoid`.
    Of groups with nearly equal costs, takes the one with the most free slots; of equals, the first.
    """
    groups = [
        group
        for group in view.generation
        if group.ready
        and group.life not in avoid
        and group.may_serve(exact=record.request.exact)
        and group.max_slot_tokens >= record.request.capacity_tokens
        and load_of(group.name).num_slots + record.num_slots <= group.num_slots
    ]
    if len(groups) < 2:
        return groups[0] if groups else None
    return min(groups, key=lambda group: (cost_of(group) // _ALIKE_S, load_of(group.name).num_slots - group.num_slots))


def choose_prefill(
    view: ClusterView, chain_for: ChainFor, avoid: Collection[object]
) -> tuple[PrefillGroup, ChainPlan, PlacementTerms] | None:
    """Return the ready prefill group where the prompt costs least, and its chain there; the first of equals.

    The cost is the predicted seconds of the chain and of its delay to other prompts together.
    """
    groups = [group for group in view.prefill if group.ready and group.life not in avoid]
    plans = [(group, *chain_for(group)) for group in groups]
    return min(plans, key=lambda each: each[2].cost_s, default=None)


def compare(chain: PlacementTerms, local: PlacementTerms | None) -> Placement:
    """Return the decision whether the chain or the generation group prefills: the chain, unless the group is faster."""
    if local is None:
        return Placement("not_predicted", chain)
    return Placement("local_faster" if local.cost_s < chain.cost_s else "chain_faster", chain, local)
