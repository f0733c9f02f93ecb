"""Objects that all groups of one cluster use together."""

from collections.abc import Callable
from dataclasses import dataclass, field

from baton.process.backoff import Backoff
from baton.process.clock import Clock
from baton.settings.place import LOOPBACK
from deploy.groups.compatibility import CompatibilityCheck
from deploy.groups.ended_workers import EndedWorkers
from deploy.groups.restarts import RESTART_PAUSES
from deploy.groups.spawner import Room, Spawner
from deploy.groups.terms import Terms


@dataclass(frozen=True)
class Heartbeat:
    """Intervals and timeouts of heartbeats."""

    interval_s: float
    """Seconds between two heartbeats. It is also the timeout for the answer to a heartbeat."""
    dead_after_s: float
    """Seconds without an answered heartbeat after which a worker is killed and replaced."""


@dataclass(frozen=True)
class Surroundings:
    """Objects that all groups of one cluster use: the spawner, heartbeat settings, the clock, and functions to report
    events."""

    spawner: Spawner
    heartbeat: Heartbeat
    clock: Clock
    report: Callable[[str], None]
    """Function that is called with one line of text for the user about each event."""
    changed: Callable[[], None] = lambda: None
    """Function that is called when a group becomes ready or stops being ready, and when a worker has ended."""
    compatibility: CompatibilityCheck = field(default_factory=CompatibilityCheck)
    backoff: Backoff = RESTART_PAUSES
    ended: EndedWorkers = field(default_factory=EndedWorkers)
    room: Room | None = None
    """Interface that reserves resources on nodes for the workers. None: workers need no reservation."""
    terms: Terms = field(default_factory=Terms)
    """Terms of the cluster's orchestrators."""
    host: str = LOOPBACK
    """Address of this process's node. The ranks of a prefill chain connect to a store at this address to create their
    links."""
