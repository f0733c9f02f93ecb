"""Reserves resources on Ray. Makes a placement group for each group of workers, and raises an error if no node can hold
the group within the timeout.

All workers of a group are placed on one node, unless `across_nodes` permits several. The groups of a pool (all groups
of one role) are spread over the nodes that have the pool's labels. The resources of a node are those that the node
declares to Ray. `WorkerNeeds` holds the resources that a worker needs. A placement group can be made even if no node
has enough free resources, because Ray's autoscaler starts nodes for placement groups that wait. The supervisor calls
this module on its event loop.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup

from baton.errors import ConfigError
from baton.process.backoff import Backoff
from deploy.ray_cluster.spawner import SMALL_CPU, is_placed, pool
from orchestrator.membership.view import role_of

logger = logging.getLogger(__name__)

_PAUSES = Backoff(0.02, 0.5)
"""Delays in seconds, from the first to the longest, between checks that Ray has placed a group."""
_SOON_S = 2.0
"""Time in seconds within which Ray usually places a group if a running node can hold it. Only longer waits are
reported."""

_GIB = 2**30
_MOST_SHOWN = 8
"""Maximum number of nodes that are listed in an error's text."""


@dataclass(frozen=True)
class WorkerNeeds:
    """Resources and labels that a node must have to run one worker of a role."""

    resources: Mapping[str, float]
    """Required amount of each resource, by Ray's name of the resource. Memory is in bytes."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Labels that the node must have."""

    def __str__(self) -> str:
        """Return the needs as readable text for error messages."""
        where = f" labelled {_listed('{}={}'.format, self.labels)}" if self.labels else ""
        return f"{_amounts(self.resources)}, on one node{where}"


Needs = Mapping[str, WorkerNeeds]
"""Mapping from the role of a worker to the resources and labels that the worker needs."""


def needs_of(
    labels: Mapping[str, Mapping[str, str]],
    memory_bytes: Mapping[str, int],
    gpu_shares: Mapping[str, float] = MappingProxyType({}),
) -> Needs:
    """Return the needs of a worker of each role. A worker needs one unit of the custom resource of its role,
    `SMALL_CPU` CPUs, and the `labels` of its role. For the roles in `memory_bytes` it also needs that many bytes of
    memory. For the roles in `gpu_shares` it also needs that share of a GPU."""
    needs = {}
    for role in ("prefill", "generate"):
        memory = {"memory": float(memory_bytes[role])} if role in memory_bytes else {}
        gpu = {"GPU": gpu_shares[role]} if role in gpu_shares else {}
        needs[role] = WorkerNeeds({pool(role): 1.0, "CPU": SMALL_CPU, **memory, **gpu}, labels.get(role, {}))
    return needs


@dataclass(frozen=True)
class Node:
    """Node of Ray that is alive, with the resources and labels that it declares."""

    node_id: str
    resources: Mapping[str, float]
    """Total amount of each resource, used and free together, by Ray's name of the resource."""
    labels: Mapping[str, str]
    address: str = ""

    def holds(self, needs: WorkerNeeds) -> int:
        """Return the maximum number of workers with these needs that the node can hold when nothing else runs on it.
        Return 0 if the node does not have the labels of `needs`."""
        if not needs.labels.items() <= self.labels.items():
            return 0
        return min(int(self.resources.get(name, 0) / amount) for name, amount in needs.resources.items())


class RayRoom:
    """Reserves the resources of groups of workers on Ray. Implements the interface Room."""

    def __init__(
        self,
        timeout_s: float,
        needs: Needs,
        *,
        node_wait_s: float = 0.0,
        across_nodes: bool = False,
        report: Callable[[str], None] = logger.info,
    ) -> None:
        """Create an object that has reserved nothing yet. `node_wait_s` is the time in seconds to wait for further
        nodes to join Ray. If it is 0, a group that would not fit even on empty nodes is refused at once. Any other
        group waits, if no node has enough free resources for it, for at most `timeout_s` or `node_wait_s` seconds,
        whichever is longer. If `across_nodes` is true, a group that does not fit on one node may use several nodes.
        `report` is called with one line of text for each group that waits."""
        self.places: dict[str, PlacementGroup] = {}
        """Ray's placement group of each group of workers, by the name of the group of workers."""
        self.needs = needs
        """Resources and labels that workers need, by role. The supervisor may replace this mapping before the first
        group is placed."""
        self._timeout_s = timeout_s
        self._node_wait_s = node_wait_s
        self._across_nodes = across_nodes
        self._report = report
        self._targets: dict[str, str] = {}
        """Id of the node that was chosen for each group, by the group's name. It is used only until Ray has placed the
        group. Afterwards the node that Ray reports is used."""

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
            self._targets[group] = least_used(nodes, group, num_workers, self._of(group), _held(self._targets))
            place = self._make(group, num_workers)
        self.places[group] = place
        if await _placed_within(place, soon_s):
            return
        wait_s = max(self._timeout_s, self._node_wait_s)
        wanted = _wanted(num_workers, self._of(group))
        self._report(f"{group} waits up to {wait_s:g} s for a node with room for it ({wanted})")
        if not await _placed_within(place, wait_s):
            await self.release(group)
            nodes = await asyncio.to_thread(living_nodes)
            raise _no_room(group, num_workers, self._of(group), nodes, f"not within {wait_s:g} s; ")

    async def reserve_all(self, sizes: Mapping[str, int]) -> None:
        """Reserve resources for all groups at once, so that Ray's autoscaler sees the whole demand. `sizes` has the
        number of workers of each group, by group name. Returns when all groups are placed. Raises ConfigError in the
        same cases as `reserve`. After an error the caller must release the groups."""
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
        check_room(nodes, sizes, self.needs, across_nodes=self._across_nodes)

    def _of(self, group: str) -> WorkerNeeds:
        return self.needs[role_of(group)]

    def _make(self, group: str, num_workers: int) -> PlacementGroup:
        """Make and return a placement group. It is on the group's target node, or on any node if the target is gone or
        full. If the group has no target, the placement group waits for a node that can hold it. If `across_nodes` is
        true, it then spans as few nodes as possible."""
        target, needs = self._targets[group], self._of(group)
        made: PlacementGroup = ray.util.placement_group(
            [dict(needs.resources)] * num_workers,
            strategy="STRICT_PACK" if target or not self._across_nodes else "PACK",
            name=group,
            lifetime="detached",
            bundle_label_selector=[dict(needs.labels)] * num_workers if needs.labels else None,
            _soft_target_node_id=target or None,
        )
        return made


def living_nodes() -> list[Node]:
    """Return the nodes that Ray reports as alive."""
    list_nodes: Callable[[], list[dict[str, Any]]] = ray.nodes  # untyped in ray
    return [
        Node(each["NodeID"], each["Resources"], each["Labels"], each["NodeManagerAddress"])
        for each in list_nodes()
        if each["Alive"]
    ]


def least_used(
    nodes: Sequence[Node], group: str, size: int, needs: WorkerNeeds, held: Mapping[str, Counter[str]]
) -> str:
    """Return the id of the node on which to place the group `group` of `size` workers. It is the node that can hold the
    group and has the fewest workers of the same role.

    Nodes with enough free resources are preferred. If no node has enough free resources, nodes that could hold the
    group when empty are considered. Returns "" if no node could hold the group even when empty. `held` has the number
    of workers of each role on each node, by the node's id.
    """
    role = role_of(group)
    able = [node for node in nodes if node.holds(needs) >= size]

    def used(node: Node) -> int:
        return held.get(node.node_id, Counter[str]())[role]

    free = [node for node in able if node.holds(needs) - used(node) >= size]
    return min(free or able, key=used).node_id if able else ""


def check_room(nodes: Sequence[Node], sizes: Mapping[str, int], needs: Needs, *, across_nodes: bool = False) -> None:
    """Raise ConfigError if `nodes` could not hold all groups of the given `sizes` even when no workers run on them.
    `sizes` has the number of workers of each group, by group name. Groups of one role must have equal sizes. Each group
    must fit on one node, unless `across_nodes` is true. Each role is checked separately, as if there were no workers of
    the other role."""
    for role in {role_of(name) for name in sizes}:
        groups = {name: size for name, size in sizes.items() if role_of(name) == role}
        held = [node.holds(needs[role]) for node in nodes]
        (size,) = {*groups.values()}
        room = sum(held) // size if across_nodes else sum(each // size for each in held)
        if len(groups) > room:
            name = list(groups)[room]
            raise _no_room(name, groups[name], needs[role], nodes)


def _held(targets: Mapping[str, str]) -> dict[str, Counter[str]]:
    """Return, by the node's id, the number of workers of each role for which room is reserved on the node. A group that
    Ray has not placed yet counts on its node in `targets`."""
    held: dict[str, Counter[str]] = {}
    table: Callable[[], dict[str, dict[str, Any]]] = ray.util.placement_group_table  # untyped in ray
    for place in table().values():
        if place["state"] != "REMOVED":
            for node_id in place["bundles_to_node_id"].values():
                node_id = node_id or targets.get(place["name"], "")
                held.setdefault(node_id, Counter())[role_of(place["name"])] += 1
    return held


async def _placed_within(place: PlacementGroup, timeout_s: float) -> bool:
    """Return whether Ray places a group within `timeout_s` seconds."""
    loop = asyncio.get_running_loop()
    deadline_s, num_checks = loop.time() + timeout_s, 0
    while not await asyncio.to_thread(is_placed, place):  # polls: a wait would block a thread
        if loop.time() >= deadline_s:
            return False
        num_checks += 1
        await asyncio.sleep(_PAUSES.after(num_checks))
    return True


def _find(group: str) -> PlacementGroup | None:
    """Return the placement group of that name in this supervisor's namespace; None if it does not exist."""
    try:
        place: PlacementGroup = ray.util.get_placement_group(group)
    except ValueError:
        return None
    return place


def _no_room(name: str, size: int, needs: WorkerNeeds, nodes: Sequence[Node], why: str = "") -> ConfigError:
    has = [f"{each.address or each.node_id} {_amounts(each.resources, needs.resources)}" for each in nodes]
    more = [f"{len(has) - _MOST_SHOWN} more"] if len(has) > _MOST_SHOWN else []
    there = f"nodes have {'; '.join([*has[:_MOST_SHOWN], *more])}" if has else "it has no nodes"
    return ConfigError(
        f"Ray has no room for {name} ({_wanted(size, needs)}; {why}{there}): use fewer ranks or groups, or add "
        "nodes that declare this; ray.node_wait_s lets groups wait for them"
    )


def _wanted(size: int, needs: WorkerNeeds) -> str:
    """Return the needs of a group of that size, as readable text."""
    return f"{size} worker{'s' if size > 1 else ''}, each {needs}"


def _amounts(resources: Mapping[str, float], names: Iterable[str] | None = None) -> str:
    """Return the amounts of `resources` as readable text: of all of them, or only of those in `names`."""
    return _listed(_amount, {name: resources.get(name, 0) for name in (resources if names is None else names)})


def _amount(name: str, amount: float) -> str:
    return f"{name} {amount / _GIB:.1f} GiB" if name == "memory" else f"{name} {amount:g}"


def _listed(show: Callable[[str, Any], str], items: Mapping[str, Any]) -> str:
    return ", ".join(show(name, value) for name, value in items.items())
