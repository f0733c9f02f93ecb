"""Room on Ray: a placement group for each group of workers, and an error when no node can hold one in time.

A group's workers are packed on one node, as a chain has to be; the groups of a pool are spread over the nodes that have
its labels. What nodes have is what they declare. A placement group that waits for a node is the demand by which Ray's
autoscaler starts one, so it is made before there is room. Used by the supervisor, on its loop.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup

from baton.errors import ConfigError
from deploy.ray_cluster.spawner import SMALL_CPU, is_placed, pool

logger = logging.getLogger(__name__)

_POLL_S = 0.5
_SOON_S = 2.0
"""Seconds in which Ray places a group that a living node can hold; only longer waits are reported."""

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

    def __init__(
        self,
        timeout_s: float,
        labels: Labels,
        *,
        node_wait_s: float = 0.0,
        across_nodes: bool = False,
        report: Callable[[str], None] = logger.info,
    ) -> None:
        """Make a Room that waits up to `timeout_s` seconds for room that is taken now, and up to `node_wait_s` for
        nodes that Ray does not have yet (0: it refuses at once). With `across_nodes` a group that no node could hold
        lies on several. `report` gets a line for each group that waits."""
        self.places: dict[str, PlacementGroup] = {}
        """Placement group of each group of workers, by name."""
        self._timeout_s = timeout_s
        self._labels = labels
        self._node_wait_s = node_wait_s
        self._across_nodes = across_nodes
        self._report = report
        self._targets: dict[str, str] = {}
        """The node that was chosen for each group, which counts until Ray has placed the group."""

    async def reserve(self, group: str, num_workers: int) -> None:
        place, soon_s = _find(group), _SOON_S
        if place is None:
            nodes = living_nodes()
            try:
                self._check({group: num_workers}, nodes)
            except ConfigError:
                if not self._node_wait_s:
                    raise
                soon_s = 0.0
            self._targets[group] = least_used(nodes, group, num_workers, self._labels, _held(self._targets))
            place = self._make(group, num_workers)
        self.places[group] = place
        if await _placed_within(place, soon_s):
            return
        wait_s = max(self._timeout_s, self._node_wait_s)
        wanted = f"{num_workers} of {_wanted(group, self._labels)}"
        self._report(f"{group} waits up to {wait_s:g} s for a node with room for it ({wanted})")
        if not await _placed_within(place, wait_s):
            await self.release(group)
            raise _no_room(group, num_workers, f"not within {wait_s:g} s", self._labels)

    async def reserve_all(self, sizes: Mapping[str, int]) -> None:
        """Reserve room for all groups of these sizes at once, so that Ray sees the whole demand. Returns when there is
        room for every one. Raises ConfigError as `reserve` does; the caller then releases the groups."""
        if not self._node_wait_s:
            self._check(sizes, living_nodes())
        reserving = [asyncio.create_task(self.reserve(name, size)) for name, size in sizes.items()]
        try:
            await asyncio.gather(*reserving)
        finally:
            for each in reserving:
                each.cancel()
            await asyncio.gather(*reserving, return_exceptions=True)

    async def release(self, group: str) -> None:
        place = self.places.pop(group, None) or _find(group)
        self._targets.pop(group, None)
        if place is not None:
            await asyncio.to_thread(ray.util.remove_placement_group, place)

    def _check(self, sizes: Mapping[str, int], nodes: Sequence[Node]) -> None:
        check_room(nodes, sizes, self._labels, across_nodes=self._across_nodes)

    def _make(self, group: str, num_workers: int) -> PlacementGroup:
        """Return a new placement group, on the group's target unless that is gone or full: then on any node. Without a
        target it waits for a node that holds it or, `across_nodes`, lies on as few nodes as hold it."""
        role = _role(group)
        wanted = dict(self._labels.get(role, {}))
        target = self._targets[group]
        made: PlacementGroup = ray.util.placement_group(
            [{"CPU": SMALL_CPU, pool(role): 1.0}] * num_workers,
            strategy="STRICT_PACK" if target or not self._across_nodes else "PACK",
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
    role = _role(group)
    able = [node for node in nodes if node.holds(role, labels) >= size]

    def used(node: Node) -> int:
        return held.get(node.node_id, Counter[str]())[role]

    free = [node for node in able if node.holds(role, labels) - used(node) >= size]
    return min(free or able, key=used).node_id if able else ""


def check_room(nodes: Sequence[Node], sizes: Mapping[str, int], labels: Labels, *, across_nodes: bool = False) -> None:
    """Raise ConfigError when these nodes, were they empty, could not hold all groups of these sizes, each on one node
    unless it may lie `across_nodes`. Groups of one pool are equally large."""
    for role in {_role(name) for name in sizes}:
        groups = {name: size for name, size in sizes.items() if _role(name) == role}
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
                held.setdefault(node_id, Counter())[_role(place["name"])] += 1
    return held


async def _placed_within(place: PlacementGroup, timeout_s: float) -> bool:
    """Return whether Ray places a group within so many seconds."""
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + timeout_s
    while not await asyncio.to_thread(is_placed, place):  # by short looks: a wait in a thread would keep the thread
        if loop.time() >= deadline_s:
            return False
        await asyncio.sleep(_POLL_S)
    return True


def _find(group: str) -> PlacementGroup | None:
    """Return the placement group of that name in this supervisor's namespace; None when there is none."""
    try:
        place: PlacementGroup = ray.util.get_placement_group(group)
    except ValueError:
        return None
    return place


def _role(group: str) -> str:
    return group.partition("-")[0]


def _no_room(name: str, size: int, why: str, labels: Labels) -> ConfigError:
    declared = "that resource and those labels" if labels.get(_role(name)) else "that resource"
    return ConfigError(
        f"Ray has no room for {name} ({size} of {_wanted(name, labels)}; {why}): use fewer ranks or groups, or add "
        f"nodes that declare {declared}; ray.node_wait_s lets it wait for them"
    )


def _wanted(name: str, labels: Labels) -> str:
    """Return what a group asks of its node, in words."""
    wanted = ", ".join(f"{key}={value}" for key, value in labels.get(_role(name), {}).items())
    where = f"one node labelled {wanted}" if wanted else "one node"
    return f"{pool(_role(name))} on {where}"
