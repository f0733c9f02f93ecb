"""Starts a Ray for one cluster: its control store and one node, on this machine.

`ray.init` would also start a dashboard server, the autoscaler's monitor and a log monitor. Baton reads nothing from
them, and they are most of the time that Ray takes to start (docs/decisions/0024-start.md). The environment is
prepared before (`deploy.commands.ray_access`). Used on the launcher's main thread: Ray's processes end with the thread
that started them.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ray._private.node import Node
from ray._private.parameter import RayParams


class _Head(Node):
    """Head node of Ray without a dashboard server."""

    def start_api_server(self, **options: Any) -> None:
        """Start no dashboard server."""
        self._webui_url = ""


def start_head(folder: Path, resources: Mapping[str, float], *, num_cpus: int, object_store_bytes: int) -> str:
    """Start Ray's processes, with their files below `folder`, and return the address of its control store, host:port.
    Blocks until the node can be joined. Raises what Ray raises; then processes may be left."""
    params = RayParams(
        num_cpus=num_cpus,
        resources=dict(resources),
        object_store_memory=object_store_bytes,
        temp_dir=str(folder),
        include_dashboard=False,
        include_log_monitor=False,  # type: ignore[arg-type]  # Ray declares a str and tests its truth
        no_monitor=True,
    )
    head = _Head(params, head=True, shutdown_at_exit=False, spawn_reaper=True, ray_init_cluster=True)
    return str(head.address)
