"""Whether Ray's nodes can hold the groups at all is seen before anything is reserved, and groups are spread."""

from collections import Counter

import pytest

from baton.errors import ConfigError
from deploy.ray_cluster.places import Node, check_room, least_used

CHAINS = {"prefill-0": 2, "prefill-1": 2}
FAST = {"prefill": {"baton-pool": "fast"}}


def nodes(*resources: dict[str, float], **labels: str) -> list[Node]:
    """Nodes n0, n1, ... that declare these resources, all with the same labels."""
    return [Node(f"n{at}", each, labels) for at, each in enumerate(resources)]


def pooled(*sizes: int) -> list[Node]:
    """Nodes with so many of baton_prefill."""
    return nodes(*({"baton_prefill": float(size)} for size in sizes))


def test_groups_that_fit_are_fine() -> None:
    check_room(nodes({"baton_prefill": 4.0, "baton_generate": 1.0}), {**CHAINS, "generate-0": 1}, {})
    check_room(nodes({"baton_prefill": 3.0}, {"baton_prefill": 2.0, "CPU": 1.0}), CHAINS, {})
    check_room([], {}, {})


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (pooled(3), r"no room for prefill-1 \(2 of baton_prefill on one node; it has 1 nodes, with 3"),
        (pooled(1, 1, 1, 1), "no room for prefill-0 .* it has 4 nodes, with 1 at most"),
        (
            nodes({"CPU": 64.0}),
            "with 0 at most.: use fewer ranks or groups, or add nodes that declare that resource; ray.node_wait_s .*$",
        ),
        ([], "it has 0 nodes"),
    ],
)
def test_groups_that_no_node_can_hold_are_named(found: list[Node], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        check_room(found, CHAINS, {})


def test_only_nodes_with_a_pool_s_labels_count_for_it() -> None:
    labelled = [Node("fast", {"baton_prefill": 4.0}, {"baton-pool": "fast", "zone": "a"})]
    check_room([*pooled(8), *labelled], CHAINS, FAST)
    with pytest.raises(ConfigError, match="on one node labelled baton-pool=fast; .* resource and those labels; "):
        check_room(pooled(8), CHAINS, FAST)


def test_groups_of_a_pool_are_spread_over_its_nodes() -> None:
    assert least_used(pooled(4, 4), "prefill-1", 2, {}, {"n0": Counter(prefill=2)}) == "n1"
    assert least_used(pooled(4, 4), "prefill-1", 2, {}, {"n0": Counter(generate=2)}) == "n0"  # of another pool


def test_a_node_that_is_full_or_too_small_gets_no_further_group() -> None:
    assert least_used(pooled(2, 8, 1), "prefill-9", 2, {}, {"n0": Counter(prefill=1), "n1": Counter(prefill=4)}) == "n1"
    full = {"n0": Counter(prefill=4), "n1": Counter(prefill=2)}
    assert (
        least_used(pooled(4, 2), "prefill-9", 2, {}, full) == "n1"
    )  # both are full: there is room when a group leaves


def test_a_group_that_no_node_can_hold_may_lie_on_several_if_it_is_allowed_to() -> None:
    check_room(pooled(1, 1, 1, 1), CHAINS, {}, across_nodes=True)
    assert least_used(pooled(1, 1), "prefill-0", 2, {}, {}) == ""
    with pytest.raises(ConfigError, match="no room for prefill-1 .* it has 3 nodes, with 1 at most"):
        check_room(pooled(1, 1, 1), CHAINS, {}, across_nodes=True)
