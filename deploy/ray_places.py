"""Room on Ray: a placement group for each group of workers, and at once an error when no node can ever hold one.

Used by the supervisor, on its loop.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup

from baton.errors import ConfigError
from deploy.cluster_config import ClusterConfig
from deploy.ray_spawner import SMALL_CPU, pool

Places = dict[str, PlacementGroup]
"""By the group's name."""


def group_sizes(config: ClusterConfig) -> dict[str, int]:
    """Workers of each group, by its name."""
    sizes = {f"prefill-{index}": config.prefill.num_ranks for index in range(config.prefill.num_groups)}
    return sizes | {f"generate-{index}": 1 for index in range(config.generate.num_groups)}


async def reserve(config: ClusterConfig, places: Places) -> None:
    """Fills `places`: a chain on one node, an engine anywhere; what an earlier supervisor reserved is found again.
    Raises ConfigError when Ray's nodes are too few or too small, and when there is no room for too long."""
    sizes = group_sizes(config)
    for name in sizes:
        try:
            places[name] = ray.util.get_placement_group(name)
        except ValueError:
            continue
    list_nodes: Callable[[], list[dict[str, Any]]] = ray.nodes  # untyped in ray
    totals = [node["Resources"] for node in list_nodes() if node["Alive"]]
    check_room(totals, {name: size for name, size in sizes.items() if name not in places})
    for name, size in sizes.items():
        if name not in places:
            bundle = {"CPU": SMALL_CPU, _pool_of(name): 1.0}
            places[name] = ray.util.placement_group(
                [bundle] * size, strategy="STRICT_PACK", name=name, lifetime="detached"
            )
    for name, place in places.items():
        if not await asyncio.to_thread(place.wait, config.supervision.start_timeout_s):
            raise _no_room(name, sizes[name], f"not within {config.supervision.start_timeout_s:g} s")


def check_room(totals: Sequence[Mapping[str, float]], sizes: Mapping[str, int]) -> None:
    """Raises ConfigError when nodes with these resources, were they empty, could not hold all groups of these sizes.
    Groups of one pool are equally large."""
    for resource in {_pool_of(name) for name in sizes}:
        groups = {name: size for name, size in sizes.items() if _pool_of(name) == resource}
        room = sum(int(total.get(resource, 0)) // size for total in totals for size in {*groups.values()})
        if len(groups) > room:
            most = max((int(total.get(resource, 0)) for total in totals), default=0)
            name = list(groups)[room]
            raise _no_room(name, groups[name], f"it has {len(totals)} nodes, with {most} at most")


def _pool_of(name: str) -> str:
    return pool(name.partition("-")[0])


def _no_room(name: str, size: int, why: str) -> ConfigError:
    return ConfigError(
        f"Ray has no room for {name} ({size} of {_pool_of(name)} on one node; {why}): "
        "use fewer ranks or groups, or add nodes that declare that resource"
    )
