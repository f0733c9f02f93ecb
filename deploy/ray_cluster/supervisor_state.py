"""The supervisor's interface for other processes: its name, its state, and the function that stops it."""

import contextlib
from dataclasses import dataclass, field

import ray
from ray.exceptions import RayError

from baton.results.completion import ModelInfo
from deploy.ray_cluster.memory import forget_memory

NAME = "supervisor"
"""Name of the supervisor's Ray actor. The actor is in the namespace of its cluster."""
STOP_S = 60.0
"""Timeout in seconds for the supervisor to end all its processes after `stop` was called."""


@dataclass(frozen=True)
class SupervisorState:
    """Snapshot of the supervisor's state, which the launcher shows to the user. A new object replaces it at each
    change."""

    pid: int
    node_id: str
    phase: str = "starting"
    """Phase of the cluster: starting, running, stopping, failed or stopped."""
    reports: tuple[str, ...] = ()
    """Latest lines of text for the user, at most 100. Lines from before the supervisor's last start are not
    included."""
    num_reports: int = 0
    """Total number of lines since the supervisor's last start, including older lines that `reports` no longer
    contains."""
    error: str = ""
    """Reason why the cluster failed, in one line; empty if it has not failed."""
    endpoint: str = ""
    """Address, host:port, at which the orchestrator serves clients. Empty until the orchestrator serves."""
    model: ModelInfo | None = None
    """Model that the cluster offers to clients. None until the cluster serves."""
    pids: dict[str, int] = field(default_factory=dict)
    """Process ids of the workers, by the worker's name."""


def end_supervisor(namespace: str) -> bool:
    """Stop the supervisor of the cluster `namespace` and all processes that it started. Return True if the supervisor
    existed."""
    try:
        actor = ray.get_actor(NAME, namespace=namespace)
    except ValueError:
        return False
    with contextlib.suppress(RayError):  # the actor is killed next in any case
        ray.get(actor.stop.remote(), timeout=STOP_S)
    ray.kill(actor)
    forget_memory(namespace)
    return True
