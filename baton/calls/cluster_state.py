"""The state of a cluster and of its groups, as values and as messages. Safe to share between threads.

Statuses of workers are not converted: a GroupState holds the worker's own message, which must not be changed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from baton.channel_options import require_version
from baton.proto_types import read
from baton.v1 import orchestrator_pb2 as pb
from baton.v1.common_pb2 import PrefixStoreStatus
from baton.v1.generate_pb2 import GenerationStatus as GenerationStatus
from baton.v1.generate_pb2 import KvLedger as KvLedger
from baton.v1.generate_pb2 import StepSample as StepSample
from baton.v1.prefill_pb2 import PrefillStatus as PrefillStatus


@dataclass(frozen=True)
class GroupState:
    """State of one group of workers: the orchestrator's view of the group, and the latest statuses that its workers
    reported."""

    name: str
    role: str
    """Role of the group: prefill or generate."""
    endpoints: tuple[str, ...]
    """Address of each rank, host:port."""
    epoch: int
    is_ready: bool
    """True if new work may be sent to the group."""
    num_leaked: int
    """Number of slots or jobs that have been held for more than 2 s without belonging to a request that the
    orchestrator knows."""
    num_requests: int
    """Number of this orchestrator's requests that the group serves."""
    is_drained: bool = False
    """True if the group gets no new work because an operator drained it."""
    is_broken: bool = False
    """True if the group gets no new work for a while, because attempts on it failed repeatedly."""
    generation: GenerationStatus | None = None
    """Latest status of a generation group; None for a prefill group, and while the group does not answer."""
    ranks: Mapping[int, PrefillStatus] = field(default_factory=dict)
    """Latest statuses of a prefill group's ranks, by rank; ranks that do not answer are missing."""
    lender: str = ""
    """Name of the group that lends this group its worker; empty when its workers are its own."""

    @property
    def readiness(self) -> str:
        """Readiness of the group for new work in one word: yes, no, draining, drained or broken."""
        if self.is_drained:
            return "draining" if self.num_requests else "drained"
        if self.is_broken:
            return "broken"
        return "yes" if self.is_ready else "no"

    @property
    def statuses(self) -> tuple[GenerationStatus | PrefillStatus, ...]:
        """Latest statuses of the group's workers, in rank order, without workers that do not answer."""
        own = () if self.generation is None else (self.generation,)
        return (*own, *(self.ranks[rank] for rank in sorted(self.ranks)))

    @property
    def prefix_store(self) -> PrefixStoreStatus | None:
        """Status of the prefix store on the group's node, as reported by one of the group's workers; None if the node
        has no prefix store."""
        return next((each.prefix_store for each in self.statuses if each.HasField("prefix_store")), None)

    @property
    def imbalance(self) -> str:
        """Description, in one readable line, of how the counts of slots or bytes of a generation group contradict each
        other; empty when they are consistent."""
        return "" if self.generation is None else self.generation.imbalance


@dataclass(frozen=True)
class ScalingChange:
    """Decision of the autoscaler that changed the number of groups, or would have changed it in advise mode."""

    unix_ns: int
    """Instant of the decision, in unix nanoseconds."""
    explanation: str
    """One readable line with the decision and the values that led to it."""


@dataclass(frozen=True)
class Scaling:
    """Latest decision of the autoscaler."""

    mode: str
    """Mode of the autoscaler: act (decisions are carried out) or advise (decisions are only reported)."""
    num_prefill: int
    """Desired number of prefill groups."""
    num_generate: int
    """Desired number of generation groups."""
    explanation: str
    """One readable line with the decision and the values that led to it."""
    forecast_rate: float = 0.0
    """Forecast number of requests per second."""
    ttft_p95_s: float = 0.0
    """Predicted 95th percentile of the time to first token with the desired numbers of groups, in seconds; infinite if
    the groups would be overloaded, 0 without traffic."""
    itl_p95_s: float = 0.0
    """Predicted 95th percentile of the time between tokens with the desired numbers of groups, in seconds; infinite if
    the groups would be overloaded, 0 without traffic."""
    changes: tuple[ScalingChange, ...] = ()
    """Latest decisions that changed the number of groups, or would have changed it, oldest first."""


@dataclass(frozen=True)
class ClusterState:
    """State of the groups, the queue and the slots, as the orchestrator sees them."""

    groups: tuple[GroupState, ...]
    num_queued: int
    num_running: int
    num_degraded: int
    """Number of requests so far that their generation group prefilled by itself because no prefill group was ready."""
    version: str
    num_queued_tokens: int = 0
    """Number of prompt tokens of all waiting requests."""
    why_not_serving: tuple[str, ...] = ()
    """Reasons why the health service reports NOT_SERVING, one line each; empty while it reports SERVING."""
    why_degraded: tuple[str, ...] = ()
    """Reasons why the cluster serves with less than its full capacity or speed, one line each; empty if there are none.
    """
    metrics_endpoint: str = ""
    """Address, host:port, at which Prometheus finds /metrics; empty when metrics are not served."""
    groups_away: tuple[str, ...] = ()
    """Names of the groups that operators removed by scaling down; they have no workers until they are added again."""
    scaling: Scaling | None = None
    """Latest decision of the autoscaler; None while it is off, or has not decided yet."""


def group_state_to_proto(group: GroupState) -> pb.GroupState:
    """Return the state of one group as a message."""
    return pb.GroupState(**vars(group))


def group_state_from_proto(message: pb.GroupState) -> GroupState:
    """Return the GroupState that a message describes. It shares the workers' status messages with `message`."""
    generation = message.generation if message.HasField("generation") else None
    endpoints = tuple(message.endpoints)
    return read(GroupState, message, endpoints=endpoints, generation=generation, ranks=dict(message.ranks))


def cluster_state_to_proto(state: ClusterState) -> pb.ClusterState:
    """Return the state of the cluster as a message."""
    groups = [group_state_to_proto(group) for group in state.groups]
    return pb.ClusterState(**vars(state) | {"groups": groups, "scaling": _scaling_to_proto(state.scaling)})


def cluster_state_from_proto(message: pb.ClusterState) -> ClusterState:
    """Return the ClusterState that a message describes. Raises VersionMismatchError if the server's version is
    incompatible."""
    require_version(message.version, "the orchestrator")
    return read(
        ClusterState,
        message,
        groups=tuple(group_state_from_proto(group) for group in message.groups),
        why_not_serving=tuple(message.why_not_serving),
        why_degraded=tuple(message.why_degraded),
        groups_away=tuple(message.groups_away),
        scaling=_scaling_from_proto(message.scaling) if message.HasField("scaling") else None,
    )


def _scaling_to_proto(scaling: Scaling | None) -> pb.Scaling | None:
    if scaling is None:
        return None
    return pb.Scaling(**vars(scaling) | {"changes": [pb.ScalingChange(**vars(each)) for each in scaling.changes]})


def _scaling_from_proto(message: pb.Scaling) -> Scaling:
    return read(Scaling, message, changes=tuple(read(ScalingChange, each) for each in message.changes))
