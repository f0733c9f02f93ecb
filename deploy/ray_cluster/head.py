"""Starts a Ray for one cluster: its control store and one node, on this machine.

`ray.init` would also start a dashboard server, the autoscaler's monitor and a log monitor. Baton does not use them, and
they cause most of the time that Ray needs to start (docs/decisions/0024-start.md). The environment must be prepared
before (`deploy.commands.ray_access`). Used on the launcher's main thread, because Ray's processes end when the thread
that started them ends.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ray._private.node import Node
from ray._private.parameter import RayParams


class _Head(Node):
    """Head node of Ray without a dashboard server."""

    def start_api_server(self, **options: Any) -> None:
        """Do nothing, so that no dashboard server is started."""
        self._webui_url = ""


def start_head(folder: Path, resources: Mapping[str, float], *, num_cpus: int, object_store_bytes: int) -> str:
    """Start Ray's processes, with their files below `folder`, and return the address of its control store, host:port.
    Blocks until the node can be joined. Raises Ray's errors; after an error some of Ray's processes may still run."""
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
