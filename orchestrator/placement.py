"""Which groups a request goes to: the least loaded that can take it (step 3 of a request's way). Pure."""

from collections.abc import Callable, Collection

from orchestrator.lifecycle import RequestRecord
from orchestrator.membership import ClusterView, GenerationGroup, Load, PrefillGroup

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


def choose_prefill(view: ClusterView, load_of: LoadOf, avoid: Collection[object]) -> PrefillGroup | None:
    """The ready group with the fewest tokens to prefill; the first of equals."""
    groups = [group for group in view.prefill if group.ready and group.life not in avoid]
    return min(groups, key=lambda group: load_of(group.name).num_tokens, default=None)
