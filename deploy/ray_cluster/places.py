"""Room on Ray: a placement group for each group of workers, and an error at once when no node can ever hold one.

Used by the supervisor, on its loop.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup

from baton.errors import ConfigError
from deploy.ray_cluster.spawner import SMALL_CPU, pool


class RayRoom:
    """Reserves the room of groups on Ray: a chain's on one node, an engine's on any. Implements Room."""

    def __init__(self, timeout_s: float) -> None:
        """Make a Room that waits up to `timeout_s` seconds for room that is taken now."""
        self.places: dict[str, PlacementGroup] = {}
        """Placement group of each group of workers, by name."""
        self._timeout_s = timeout_s

    async def reserve(self, group: str, num_workers: int) -> None:
        place = _find(group)
        if place is None:
            check_room(node_resources(), {group: num_workers})
            bundle = {"CPU": SMALL_CPU, _pool_of(group): 1.0}
            place = ray.util.placement_group(
                [bundle] * num_workers, strategy="STRICT_PACK", name=group, lifetime="detached"
            )
        self.places[group] = place
        if not await asyncio.to_thread(place.wait, self._timeout_s):
            await self.release(group)
            raise _no_room(group, num_workers, f"not within {self._timeout_s:g} s")

    async def release(self, group: str) -> None:
        place = self.places.pop(group, None) or _find(group)
        if place is not None:
            await asyncio.to_thread(ray.util.remove_placement_group, place)


def node_resources() -> list[Mapping[str, float]]:
    """Return the resources that each of Ray's living nodes declares, in use or not."""
    list_nodes: Callable[[], list[dict[str, Any]]] = ray.nodes  # untyped in ray
    return [node["Resources"] for node in list_nodes() if node["Alive"]]


def check_room(totals: Sequence[Mapping[str, float]], sizes: Mapping[str, int]) -> None:
    """Raise ConfigError when nodes with these resources, were they empty, could not hold all groups of these sizes.
    Groups of one pool are equally large."""
    for resource in {_pool_of(name) for name in sizes}:
        groups = {name: size for name, size in sizes.items() if _pool_of(name) == resource}
        room = sum(int(total.get(resource, 0)) // size for total in totals for size in {*groups.values()})
        if len(groups) > room:
            most = max((int(total.get(resource, 0)) for total in totals), default=0)
            name = list(groups)[room]
            raise _no_room(name, groups[name], f"it has {len(totals)} nodes, with {most} at most")


def _find(group: str) -> PlacementGroup | None:
    """Return the placement group of that name in this supervisor's namespace; None when there is none."""
    try:
        place: PlacementGroup = ray.util.get_placement_group(group)
    except ValueError:
        return None
    return place


def _pool_of(name: str) -> str:
    return pool(name.partition("-")[0])


def _no_room(name: str, size: int, why: str) -> ConfigError:
    return ConfigError(
        f"Ray has no room for {name} ({size} of {_pool_of(name)} on one node; {why}): "
        "use fewer ranks or groups, or add nodes that declare that resource"
    )
