"""The supervisor's interface for other processes: its name, its state, and how to stop it."""

import contextlib
from dataclasses import dataclass, field

import ray
from ray.exceptions import RayError

from baton.results.completion import ModelInfo
from deploy.ray_cluster.kept_files import forget_files
from deploy.ray_cluster.memory import forget_memory

NAME = "supervisor"
"""Name of the supervisor's actor, in the namespace of its cluster."""
STOP_S = 60.0
"""Timeout in seconds for a supervisor that is stopped to end all its processes."""


@dataclass(frozen=True)
class SupervisorState:
    """The supervisor's state, as the launcher shows it. Replaced as a whole."""

    pid: int
    node_id: str
    phase: str = "starting"
    """Phase of the cluster: starting, running, stopping, failed or stopped."""
    reports: tuple[str, ...] = ()
    """Latest lines for the user since the supervisor's last start."""
    num_reports: int = 0
    """Number of lines so far, those no longer in `reports` included."""
    error: str = ""
    """Why the cluster failed, in one line."""
    endpoint: str = ""
    """Address at which the orchestrator serves clients, host:port; empty before it serves."""
    model: ModelInfo | None = None
    """The model that clients are served; None before they are."""
    pids: dict[str, int] = field(default_factory=dict)
    """Process ids of the workers, by name."""


def end_supervisor(namespace: str) -> bool:
    """Stop the supervisor of that namespace, with all that it made. Return whether there was one."""
    try:
        actor = ray.get_actor(NAME, namespace=namespace)
    except ValueError:
        return False
    with contextlib.suppress(RayError):  # the actor is killed next in any case
        ray.get(actor.stop.remote(), timeout=STOP_S)
    ray.kill(actor)
    forget_memory(namespace)
    forget_files(namespace)
    return True
