"""Ray's fake node provider, whose nodes are processes of this machine. Ray's autoscaler imports this module by name."""

from collections.abc import Callable, Mapping
from typing import Any

from ray.autoscaler._private.fake_multi_node.node_provider import FakeMultiNodeProvider


class NodeProvider(FakeMultiNodeProvider):
    """Variant of Ray's provider for node types that declare memory. Ray's provider would pass memory as a custom
    resource, which Ray does not accept."""

    def create_node_with_resources_and_labels(
        self,
        node_config: Any,
        tags: Mapping[str, str],
        count: int,
        resources: Mapping[str, float],
        labels: Mapping[str, str],
    ) -> None:
        """Start `count` nodes of a type. Each node declares the memory that it detects."""
        told = {name: amount for name, amount in resources.items() if name != "memory"}
        create: Callable[..., None] = super().create_node_with_resources_and_labels  # untyped in ray
        create(node_config, tags, count, told, labels)
