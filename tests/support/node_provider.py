"""Ray's provider of nodes that are processes of this machine, for its autoscaler, which imports this module by name."""

from collections.abc import Callable, Mapping
from typing import Any

from ray.autoscaler._private.fake_multi_node.node_provider import FakeMultiNodeProvider


class NodeProvider(FakeMultiNodeProvider):
    """As Ray's own, for types of nodes that declare memory, which Ray would not know as a resource."""

    def create_node_with_resources_and_labels(
        self,
        node_config: Any,
        tags: Mapping[str, str],
        count: int,
        resources: Mapping[str, float],
        labels: Mapping[str, str],
    ) -> None:
        """Starts so many nodes of a type; each declares the memory that it finds."""
        told = {name: amount for name, amount in resources.items() if name != "memory"}
        create: Callable[..., None] = super().create_node_with_resources_and_labels  # untyped in ray
        create(node_config, tags, count, told, labels)
