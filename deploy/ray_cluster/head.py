"""Starts a Ray for one cluster: Ray's control store and one node, on this machine.

`ray.init` would also start a dashboard server, the autoscaler's monitor and a log monitor. Baton does not use these
processes, and they take most of the time that Ray needs to start (docs/decisions/0024-start.md).
`deploy.commands.ray_access` must have prepared the process's environment before this module is imported. Functions run
on the launcher's main thread, because Ray's processes end when the thread that started them ends.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ray._private.node import Node
from ray._private.parameter import RayParams


class _Head(Node):
    """Head node of Ray that does not start a dashboard server."""

    def start_api_server(self, **options: Any) -> None:
        """Override of Ray's method. Does nothing, because the dashboard server is not needed."""
        self._webui_url = ""


def start_head(folder: Path, resources: Mapping[str, float], *, num_cpus: int, object_store_bytes: int) -> str:
    """Start Ray's processes and return the address of Ray's control store, host:port. Ray's files are written below
    `folder`. Blocks until clients can join the node. Raises Ray's errors. After an error, some of Ray's processes may
    still run."""
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
