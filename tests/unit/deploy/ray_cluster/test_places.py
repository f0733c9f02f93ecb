"""Whether Ray's nodes can hold the groups at all is seen before anything is reserved, and groups are spread."""

from collections import Counter

import pytest

from baton.errors import ConfigError
from deploy.ray_cluster.places import Node, WorkerNeeds, check_room, least_used, needs_of

CHAINS = {"prefill-0": 2, "prefill-1": 2}
PLAIN = needs_of({}, {})
FAST = needs_of({"prefill": {"baton-pool": "fast"}}, {})
GIB = 2**30


def nodes(*resources: dict[str, float], **labels: str) -> list[Node]:
    """Nodes n0, n1, ... that declare these resources and a CPU, all with the same labels."""
    return [Node(f"n{at}", {"CPU": 1.0, **each}, labels) for at, each in enumerate(resources)]


def pooled(*sizes: int) -> list[Node]:
    """Nodes with so many of baton_prefill."""
    return nodes(*({"baton_prefill": float(size)} for size in sizes))


def test_groups_that_fit_are_fine() -> None:
    check_room(nodes({"baton_prefill": 4.0, "baton_generate": 1.0}), {**CHAINS, "generate-0": 1}, PLAIN)
    check_room(nodes({"baton_prefill": 3.0}, {"baton_prefill": 2.0}), CHAINS, PLAIN)
    check_room([], {}, PLAIN)


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (
            pooled(3),
            r"no room for prefill-1 \(2 workers, each baton_prefill 1, CPU 0.01, on one node; "
            r"nodes have n0 baton_prefill 3, CPU 1\): use fewer",
        ),
        (pooled(1, 1), "no room for prefill-0 .* nodes have n0 baton_prefill 1, CPU 1; n1 baton_prefill 1, CPU 1.: "),
        (pooled(*[1] * 10), "n7 baton_prefill 1, CPU 1; 2 more.: "),
        (nodes({"CPU": 64.0}), "n0 baton_prefill 0, CPU 64.: use fewer ranks or groups, or add nodes that declare"),
        ([], "it has no nodes.: .* ray.node_wait_s lets groups wait for them$"),
    ],
)
def test_groups_that_no_node_can_hold_are_named(found: list[Node], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        check_room(found, CHAINS, PLAIN)


def test_workers_that_share_gpus_fit_where_their_shares_do() -> None:
    needs = needs_of({}, {}, {"prefill": 0.5})
    check_room(nodes({"baton_prefill": 4.0, "GPU": 2.0}), CHAINS, needs)
    with pytest.raises(ConfigError, match=r"no room for prefill-1 .*GPU 0.5, on one node"):
        check_room(nodes({"baton_prefill": 4.0, "GPU": 1.0}), CHAINS, needs)
    check_room(nodes({"baton_generate": 1.0}), {"generate-0": 1}, needs)  # which computes on none


def test_a_node_without_memory_or_cpus_for_a_group_does_not_hold_it() -> None:
    needs = needs_of({}, {"prefill": 3 * GIB})
    check_room(nodes({"baton_prefill": 4.0, "memory": 12.0 * GIB}), CHAINS, needs)
    check_room(nodes({"baton_generate": 1.0}), {"generate-0": 1}, needs)  # whose workers' memory is not known
    text = r"each baton_prefill 1, CPU 0.01, memory 3.0 GiB, on one node; nodes have n0 .*, CPU 1, memory 11.0 GiB\)"
    with pytest.raises(ConfigError, match=f"no room for prefill-1 .*{text}"):
        check_room(nodes({"baton_prefill": 4.0, "memory": 11.0 * GIB}), CHAINS, needs)
    with pytest.raises(ConfigError, match="n0 baton_prefill 4, CPU 0"):
        check_room(nodes({"baton_prefill": 4.0, "CPU": 0.0}), CHAINS, PLAIN)


def test_only_nodes_with_a_pool_s_labels_count_for_it() -> None:
    labelled = [Node("fast", {"baton_prefill": 4.0, "CPU": 1.0}, {"baton-pool": "fast", "zone": "a"})]
    check_room([*pooled(8), *labelled], CHAINS, FAST)
    with pytest.raises(ConfigError, match="on one node labelled baton-pool=fast; nodes have n0"):
        check_room(pooled(8), CHAINS, FAST)


def least_used_of(found: list[Node], group: str, held: dict[str, Counter[str]]) -> str:
    """The node for a group of two that needs no more than its pool."""
    return least_used(found, group, 2, PLAIN["prefill"], held)


def test_groups_of_a_pool_are_spread_over_its_nodes() -> None:
    assert least_used_of(pooled(4, 4), "prefill-1", {"n0": Counter(prefill=2)}) == "n1"
    assert least_used_of(pooled(4, 4), "prefill-1", {"n0": Counter(generate=2)}) == "n0"  # of another pool


def test_a_node_that_is_full_or_too_small_gets_no_further_group() -> None:
    assert least_used_of(pooled(2, 8, 1), "prefill-9", {"n0": Counter(prefill=1), "n1": Counter(prefill=4)}) == "n1"
    full = {"n0": Counter(prefill=4), "n1": Counter(prefill=2)}
    assert least_used_of(pooled(4, 2), "prefill-9", full) == "n1"  # both are full: there is room when a group leaves


def test_a_group_that_no_node_can_hold_may_lie_on_several_if_it_is_allowed_to() -> None:
    check_room(pooled(1, 1, 1, 1), CHAINS, PLAIN, across_nodes=True)
    assert least_used_of(pooled(1, 1), "prefill-0", {}) == ""
    with pytest.raises(ConfigError, match="no room for prefill-1 .* nodes have n0 baton_prefill 1, CPU 1; n1"):
        check_room(pooled(1, 1, 1), CHAINS, PLAIN, across_nodes=True)


def test_needs_are_said_in_words() -> None:
    needs = WorkerNeeds({"baton_generate": 1.0, "memory": 1.5 * GIB}, {"baton-pool": "generate", "zone": "a"})
    assert str(needs) == "baton_generate 1, memory 1.5 GiB, on one node labelled baton-pool=generate, zone=a"
