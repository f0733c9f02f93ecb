"""Room on Ray: a placement group for each group of workers, and an error at once when no node can ever hold one.

A group's workers are packed on one node, as a chain has to be; the groups of a pool are spread over the nodes that have
its labels. What nodes have is what they declare. Used by the supervisor, on its loop.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup

from baton.errors import ConfigError
from deploy.ray_cluster.spawner import SMALL_CPU, pool
from orchestrator.membership.view import role_of

_POLL_S = 0.5

Labels = Mapping[str, Mapping[str, str]]
"""Labels that nodes of a pool have, by role; a role that is not there takes any node."""


@dataclass(frozen=True)
class Node:
    """A living node of Ray, as it declares itself."""

    node_id: str
    resources: Mapping[str, float]
    """What it has in all, in use or not."""
    labels: Mapping[str, str]

    def holds(self, role: str, labels: Labels) -> int:
        """Return how many workers of a role the node has room for when it is empty; 0 without the pool's labels."""
        if not labels.get(role, {}).items() <= self.labels.items():
            return 0
        return int(self.resources.get(pool(role), 0))


class RayRoom:
    """Reserves the room of groups on Ray. Implements Room."""

    def __init__(self, timeout_s: float, labels: Labels, *, across_nodes: bool = False) -> None:
        """Make a Room that waits up to `timeout_s` seconds for room that is taken now. With `across_nodes` a group that
        no node could hold lies on several."""
        self.places: dict[str, PlacementGroup] = {}
        """Placement group of each group of workers, by name."""
        self._timeout_s = timeout_s
        self._labels = labels
        self._across_nodes = across_nodes
        self._targets: dict[str, str] = {}
        """The node that was chosen for each group, which counts until Ray has placed the group."""

    async def reserve(self, group: str, num_workers: int) -> None:
        place = _find(group)
        if place is None:
            nodes = living_nodes()
            check_room(nodes, {group: num_workers}, self._labels, across_nodes=self._across_nodes)
            held = _held(self._targets)
            self._targets[group] = least_used(nodes, group, num_workers, self._labels, held)
            place = self._make(group, num_workers)
        self.places[group] = place
        if not await asyncio.to_thread(place.wait, self._timeout_s):
            await self.release(group)
            raise _no_room(group, num_workers, f"not within {self._timeout_s:g} s", self._labels)

    async def release(self, group: str) -> None:
        place = self.places.pop(group, None) or _find(group)
        if place is not None:
            await asyncio.to_thread(ray.util.remove_placement_group, place)

    def _make(self, group: str, num_workers: int) -> PlacementGroup:
        """Return a new placement group, on the group's target unless that is gone or full: then on any node. Without a
        target it lies on as few nodes as hold it."""
        role = role_of(group)
        wanted = dict(self._labels.get(role, {}))
        target = self._targets[group]
        made: PlacementGroup = ray.util.placement_group(
            [{"CPU": SMALL_CPU, pool(role): 1.0}] * num_workers,
            strategy="STRICT_PACK" if target else "PACK",
            name=group,
            lifetime="detached",
            bundle_label_selector=[wanted] * num_workers if wanted else None,
            _soft_target_node_id=target or None,
        )
        return made


def living_nodes() -> list[Node]:
    """Return Ray's living nodes."""
    list_nodes: Callable[[], list[dict[str, Any]]] = ray.nodes  # untyped in ray
    return [Node(each["NodeID"], each["Resources"], each["Labels"]) for each in list_nodes() if each["Alive"]]


def least_used(nodes: Sequence[Node], group: str, size: int, labels: Labels, held: Mapping[str, Counter[str]]) -> str:
    """Return the id of the node for a further group of that size: of those that can hold it beside their other groups
    of the pool, the one with the fewest; if there is none, of those that could hold it alone; empty if none could.
    `held` has the workers of each role on each node, by the node's id."""
    role = role_of(group)
    able = [node for node in nodes if node.holds(role, labels) >= size]

    def used(node: Node) -> int:
        return held.get(node.node_id, Counter[str]())[role]

    free = [node for node in able if node.holds(role, labels) - used(node) >= size]
    return min(free or able, key=used).node_id if able else ""


async def wait_for_room(
    sizes: Mapping[str, int],
    timeout_s: float,
    report: Callable[[str], None],
    labels: Labels,
    list_nodes: Callable[[], Sequence[Node]] = living_nodes,
    *,
    across_nodes: bool = False,
) -> None:
    """Return when Ray's nodes, were they empty, could hold all groups of these sizes: at once, or when further nodes
    have joined. The first lack is reported. Raises ConfigError, as `check_room` does, after `timeout_s` seconds."""
    loop = asyncio.get_running_loop()
    deadline_s, reported = loop.time() + timeout_s, False
    while True:
        try:
            check_room(await asyncio.to_thread(list_nodes), sizes, labels, across_nodes=across_nodes)
        except ConfigError as error:
            if loop.time() >= deadline_s:
                raise
            if not reported:
                report(f"waiting up to {timeout_s:g} s for nodes to join: {error}")
                reported = True
        else:
            return
        await asyncio.sleep(_POLL_S)


def check_room(nodes: Sequence[Node], sizes: Mapping[str, int], labels: Labels, *, across_nodes: bool = False) -> None:
    """Raise ConfigError when these nodes, were they empty, could not hold all groups of these sizes, each on one node
    unless it may lie `across_nodes`. Groups of one pool are equally large."""
    for role in {role_of(name) for name in sizes}:
        groups = {name: size for name, size in sizes.items() if role_of(name) == role}
        held = [node.holds(role, labels) for node in nodes]
        (size,) = {*groups.values()}
        room = sum(held) // size if across_nodes else sum(each // size for each in held)
        if len(groups) > room:
            name = list(groups)[room]
            raise _no_room(name, groups[name], f"it has {len(held)} nodes, with {max(held, default=0)} at most", labels)


def _held(targets: Mapping[str, str]) -> dict[str, Counter[str]]:
    """Return the workers of each role for which groups hold room, by the node's id: the node in `targets` for a group
    that Ray has not placed yet."""
    held: dict[str, Counter[str]] = {}
    table: Callable[[], dict[str, dict[str, Any]]] = ray.util.placement_group_table  # untyped in ray
    for place in table().values():
        if place["state"] != "REMOVED":
            for node_id in place["bundles_to_node_id"].values():
                node_id = node_id or targets.get(place["name"], "")
                held.setdefault(node_id, Counter())[role_of(place["name"])] += 1
    return held


def _find(group: str) -> PlacementGroup | None:
    """Return the placement group of that name in this supervisor's namespace; None when there is none."""
    try:
        place: PlacementGroup = ray.util.get_placement_group(group)
    except ValueError:
        return None
    return place


def _no_room(name: str, size: int, why: str, labels: Labels) -> ConfigError:
    role = role_of(name)
    wanted = ", ".join(f"{key}={value}" for key, value in labels.get(role, {}).items())
    where = f"one node labelled {wanted}" if wanted else "one node"
    declared = "that resource and those labels" if wanted else "that resource"
    return ConfigError(
        f"Ray has no room for {name} ({size} of {pool(role)} on {where}; {why}): use fewer ranks or groups, or add "
        f"nodes that declare {declared}"
    )
