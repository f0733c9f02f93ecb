"""Which groups a request goes to, of those that can take it: where prefill costs least, and where most slots are free.

Step 3 of a request's way (DESIGN.md, section 4). Pure.
"""

from collections.abc import Callable, Collection
from typing import TypeVar

from orchestrator.lifecycle import RequestRecord
from orchestrator.membership import ClusterView, GenerationGroup, Load, PrefillGroup
from orchestrator.widths import ChainPlan

T = TypeVar("T")
Choose = Callable[[Collection[object]], T | None]
"""Lives of groups to avoid -> what is chosen as things are; None for nothing."""
PlanFor = Callable[[PrefillGroup], ChainPlan]
"""A group -> the request's chain there, as things are."""
LoadOf = Callable[[str], Load]
"""A group's name -> its load."""


def choose_generation(
    view: ClusterView, load_of: LoadOf, request: RequestRecord, avoid: Collection[object]
) -> GenerationGroup | None:
    """The ready group with the most free slots, of which there are enough, and large enough; the first of equals.
    None: nobody has room now."""
    groups = [
        group
        for group in view.generation
        if group.ready
        and group.life not in avoid
        and group.max_slot_tokens >= request.capacity_tokens
        and load_of(group.name).num_slots + request.num_slots <= group.num_slots
    ]
    return max(groups, key=lambda group: group.num_slots - load_of(group.name).num_slots, default=None)


def choose_prefill(
    view: ClusterView, plan_for: PlanFor, avoid: Collection[object]
) -> tuple[PrefillGroup, ChainPlan] | None:
    """The ready group where the prompt costs least, its own predicted seconds and the others' together, and its chain
    there; the first of equals."""
    groups = [group for group in view.prefill if group.ready and group.life not in avoid]
    plans = [(group, plan_for(group)) for group in groups]
    return min(plans, key=lambda each: each[1].cost_s, default=None)
