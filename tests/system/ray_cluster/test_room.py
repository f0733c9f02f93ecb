"""Reservation of resources on a Ray instance of two nodes: the groups of a pool are spread over nodes, each group is on
a single node, and labels are respected."""

import asyncio
from contextlib import ExitStack
from typing import Any

import pytest
import ray

from baton.errors import ConfigError
from deploy.ray_cluster.places import RayRoom, living_nodes, needs_of
from tests.support.clusters.on_ray.ray_heads import RayHead, ray_node

pytestmark = [pytest.mark.cluster, pytest.mark.ci]
PLAIN = needs_of({}, {})
NEEDED = "baton_prefill 1, CPU 0.01, on one node"
LABELLED = needs_of({"prefill": {"baton-pool": "prefill"}}, {})


@pytest.mark.usefixtures("joined")
async def test_groups_of_a_pool_are_spread_and_each_is_on_one_node() -> None:
    room = RayRoom(30.0, PLAIN)
    for name in ("prefill-0", "prefill-1"):
        await room.reserve(name, 2)
    first, second = (nodes_of(name) for name in ("prefill-0", "prefill-1"))
    assert len(first) == len(second) == 1 and first != second
    await room.reserve("prefill-2", 4 - 2)  # beside one of them
    with pytest.raises(ConfigError, match=r"no room for prefill-3 \(3 workers, .* on one node; not within 1 s"):
        await RayRoom(1.0, PLAIN).reserve("prefill-3", 3)
    for name in ("prefill-0", "prefill-1", "prefill-2"):
        await room.release(name)


@pytest.mark.usefixtures("joined")
async def test_a_pool_s_labels_are_kept_to() -> None:
    room = RayRoom(30.0, LABELLED)
    for name in ("prefill-0", "prefill-1"):
        await room.reserve(name, 2)
    (labelled,) = [each["NodeID"] for each in ray.nodes() if each["Labels"].get("baton-pool") == "prefill"]  # type: ignore[no-untyped-call]
    assert nodes_of("prefill-0") == nodes_of("prefill-1") == {labelled}
    for name in ("prefill-0", "prefill-1"):
        await room.release(name)


@pytest.mark.usefixtures("joined")
async def test_groups_wait_for_a_node_that_may_still_join_and_say_so(bare: RayHead) -> None:
    reports = asyncio.Queue[str]()
    room = RayRoom(30.0, PLAIN, node_wait_s=60.0, report=reports.put_nowait)
    sizes = {"prefill-0": 6, "prefill-1": 6}
    reserving = asyncio.create_task(room.reserve_all(sizes))
    told = {f"{name} waits up to 60 s for a node with room for it (6 workers, each {NEEDED})" for name in sizes}
    assert {await reports.get() for _ in sizes} == told
    with ExitStack() as stack:
        await asyncio.to_thread(stack.enter_context, ray_node(bare, {"baton_prefill": 12}))
        await reserving
        assert len(nodes_of("prefill-0")) == 1 and nodes_of("prefill-0") == nodes_of("prefill-1")
        for name in sizes:
            await room.release(name)


@pytest.mark.usefixtures("joined")
async def test_a_group_gets_the_memory_that_it_needs_beside_others() -> None:
    memory = [each.resources["memory"] for each in living_nodes()]
    room = RayRoom(30.0, needs_of({}, {"prefill": int(0.6 * min(memory))}))
    for name in ("prefill-0", "prefill-1"):
        await room.reserve(name, 1)
    assert nodes_of("prefill-0") != nodes_of("prefill-1")
    with pytest.raises(ConfigError, match="memory .* GiB, on one node; nodes have .*memory"):
        await room.reserve("prefill-2", 3)
    for name in ("prefill-0", "prefill-1"):
        await room.release(name)


@pytest.mark.usefixtures("joined")
async def test_of_groups_that_are_refused_no_room_is_kept_once_all_are_released() -> None:
    room = RayRoom(1.0, PLAIN, node_wait_s=1.0)
    sizes = {"prefill-0": 4, "prefill-1": 9}
    with pytest.raises(ConfigError, match=r"no room for prefill-1 \(9 workers, .* node; not within 1 s; nodes have"):
        await room.reserve_all(sizes)
    for name in sizes:
        await room.release(name)
    assert nodes_of("prefill-0") == nodes_of("prefill-1") == set()


def nodes_of(group: str) -> set[str]:
    """Ids of the nodes on which the workers of a group have their room."""
    table: dict[str, Any] = ray.util.placement_group_table()
    return {
        node_id
        for place in table.values()
        if place["name"] == group and place["state"] == "CREATED"
        for node_id in place["bundles_to_node_id"].values()
    }
