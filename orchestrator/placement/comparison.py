"""Compares the options to serve a request by predicted seconds. An option is a generation group together with the
workers that prefill.

The workers that prefill are either a chain of ranks in a prefill group, or the generation group itself. The cost of an
option is the sum of `baton.results.prefill_trace.PlacementTerms`, predicted by `orchestrator.placement.predictions`. A
prefill by the generation group delays the group's running sequences. This delay is not a term of the cost, because the
engine limits it (`generate_workers.engine.step_bound`). Called by `orchestrator.placement.chooser`. Does no I/O.
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
"""Function that takes the name of a group and returns the group's load."""

_ALIKE_S = 1e-3
"""Resolution in seconds for comparing costs. If several groups have equal costs at this resolution, the group with the
most free slots is selected."""


@dataclass(frozen=True)
class ChainWay:
    """Option to prefill a request by a chain of ranks in a prefill group, with its predicted costs."""

    group: PrefillGroup
    chain: ChainPlan
    terms: PlacementTerms
    fetch: BlockFetch | None = None
    """Fetch of cached KV to the chain's node, which must end before the chain starts. None if no KV is fetched."""


@dataclass(frozen=True)
class LocalWay:
    """Option to prefill a request on the generation group itself, with its predicted costs."""

    terms: PlacementTerms
    fetch: BlockFetch | None = None
    """Fetch of cached KV to the group's node, which must end before the prefill starts. None if no KV is fetched."""


def able_groups(view: ClusterView, record: RequestRecord, avoid: Collection[Hashable] = ()) -> list[GenerationGroup]:
    """Return the ready generation groups that may serve the request and whose slots are large enough. Groups whose
    incarnation is in `avoid` are excluded."""
    return [
        group
        for group in view.generation
        if group.ready and group.incarnation not in avoid and could_serve(group, record)
    ]


def could_serve(group: GenerationGroup, record: RequestRecord) -> bool:
    """Return True if the group could serve the request once it is ready: its slots are large enough, and it attends to
    all tokens if the request requires this."""
    is_allowed = group.may_serve(exact=record.request.exact)
    return is_allowed and group.max_slot_tokens >= record.request.capacity_tokens


def groups_with_room(groups: Iterable[GenerationGroup], load_of: LoadOf, num_slots: int) -> list[GenerationGroup]:
    """Return the groups with at least `num_slots` free slots. A slot counts as used only if a request of this
    orchestrator uses it."""
    return [group for group in groups if load_of(group.name).num_slots + num_slots <= group.num_slots]


def cheapest_group(
    groups: Collection[GenerationGroup], load_of: LoadOf, cost_of: Callable[[GenerationGroup], float]
) -> GenerationGroup | None:
    """Return the group with the least cost; None if there are no groups. If there is only one group, its cost is not
    computed.

    Among groups with nearly equal costs, the group with the most free slots is returned. If these are equal too, the
    first such group is returned.
    """
    if len(groups) < 2:
        return next(iter(groups), None)
    return min(groups, key=lambda group: (cost_of(group) // _ALIKE_S, load_of(group.name).num_slots - group.num_slots))


def compare(chain: PlacementTerms, local: PlacementTerms | None) -> Placement:
    """Decide whether the chain or the generation group should prefill. `chain` and `local` are the predicted costs of
    these two options. The generation group is selected if its cost is lower; otherwise the chain is selected. `local`
    is None if its cost cannot be predicted. Then the chain is selected."""
    if local is None:
        return Placement("not_predicted", chain)
    return Placement("local_faster" if local.cost_s < chain.cost_s else "chain_faster", chain, local)
