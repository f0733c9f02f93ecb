"""Which groups a request goes to, of those that can take it, and who prefills it: one comparison, in predicted seconds.

A way to serve a request is a generation group and, to prefill it, a prefill group with a chain or the generation group
itself. Each has its terms (`baton.results.PlacementTerms`): what is queued before it, its own prefill without what is
cached there, the decode steps in between, the transfer of KV that the group lacks, and what it costs other prompts.
`prospects` predicts them; here they are compared. What a local prefill costs running rows is bounded by their engine
(`generate_workers.engine.step_bound`), and is no term.

Step 3 of a request's way (DESIGN.md, section 4). Pure.
"""

from collections.abc import Callable, Collection
from typing import TypeVar

from baton.results import Placement, PlacementTerms
from orchestrator.membership.members import ClusterView, GenerationGroup, Load, PrefillGroup
from orchestrator.placement.chain_width import ChainPlan
from orchestrator.requests.record import RequestRecord

T = TypeVar("T")
Choose = Callable[[Collection[object]], T | None]
"""Lives of groups to avoid -> what is chosen as things are; None for nothing."""
Chain = tuple[ChainPlan, PlacementTerms]
"""A request's chain in a prefill group, and what is predicted of it."""
ChainFor = Callable[[PrefillGroup], Chain]
"""A group -> the request's chain there, as things are."""
LoadOf = Callable[[str], Load]
"""A group's name -> its load."""
CostOf = Callable[[GenerationGroup], float]
"""A group -> predicted seconds of the best way there."""

_ALIKE_S = 1e-3
"""Predictions that differ by less are alike: then the group with the most room is taken."""


def choose_generation(
    view: ClusterView,
    load_of: LoadOf,
    request: RequestRecord,
    avoid: Collection[object],
    cost_of: CostOf = lambda group: 0.0,
) -> GenerationGroup | None:
    """Of the ready groups that may serve it, with enough free slots, and large enough ones, that where it costs least;
    of those alike the one with the most free slots, of equals the first. None: nobody has room now."""
    groups = [
        group
        for group in view.generation
        if group.ready
        and group.life not in avoid
        and group.may_serve(exact=request.exact)
        and group.max_slot_tokens >= request.capacity_tokens
        and load_of(group.name).num_slots + request.num_slots <= group.num_slots
    ]
    if len(groups) < 2:
        return groups[0] if groups else None
    return min(groups, key=lambda group: (cost_of(group) // _ALIKE_S, load_of(group.name).num_slots - group.num_slots))


def choose_prefill(
    view: ClusterView, chain_for: ChainFor, avoid: Collection[object]
) -> tuple[PrefillGroup, ChainPlan, PlacementTerms] | None:
    """The ready group where the prompt costs least, its own predicted seconds and the others' together, and its chain
    there; the first of equals."""
    groups = [group for group in view.prefill if group.ready and group.life not in avoid]
    plans = [(group, *chain_for(group)) for group in groups]
    return min(plans, key=lambda each: each[2].cost_s, default=None)


def compare(chain: PlacementTerms, local: PlacementTerms | None) -> Placement:
    """Who prefills, where both could: the chain, unless the generation group is faster."""
    if local is None:
        return Placement("not_predicted", chain)
    return Placement("local_faster" if local.cost_s < chain.cost_s else "chain_faster", chain, local)
