"""Whether Ray's nodes can hold the groups at all is seen before anything is reserved."""

import pytest

from baton.errors import ConfigError
from deploy.ray_cluster.places import check_room

CHAINS = {"prefill-0": 2, "prefill-1": 2}


def test_groups_that_fit_are_fine() -> None:
    check_room([{"baton_prefill": 4.0, "baton_generate": 1.0}], {**CHAINS, "generate-0": 1})
    check_room([{"baton_prefill": 3.0}, {"baton_prefill": 2.0, "CPU": 1.0}], CHAINS)
    check_room([], {})


@pytest.mark.parametrize(
    ("totals", "text"),
    [
        ([{"baton_prefill": 3.0}], r"no room for prefill-1 \(2 of baton_prefill on one node; it has 1 nodes, with 3"),
        ([{"baton_prefill": 1.0}] * 4, "no room for prefill-0 .* it has 4 nodes, with 1 at most"),
        ([{"CPU": 64.0}], "with 0 at most.: use fewer ranks or groups, or add nodes that declare that resource"),
        ([], "it has 0 nodes"),
    ],
)
def test_groups_that_no_node_can_hold_are_named(totals: list[dict[str, float]], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        check_room(totals, CHAINS)
