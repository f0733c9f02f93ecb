"""State of a cluster and of its groups of workers: the dataclasses, and their conversion from and to protobuf messages.
Thread-safe.

Statuses of workers are not converted. A GroupState contains the protobuf messages that the workers sent, and these
messages must not be changed.
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
    """State of one group of workers: the orchestrator's view of the group, and the latest statuses reported by its
    workers."""

    name: str
    role: str
    """Role of the group: prefill or generate."""
    endpoints: tuple[str, ...]
    """Address (host:port) of each rank of the group."""
    epoch: int
    is_ready: bool
    """True if new requests may be sent to the group."""
    num_leaked: int
    """Number of leaked slots or prefill jobs of the group. A slot or job is leaked if it has been in use for more than
    2 s without belonging to a request that the orchestrator knows."""
    num_requests: int
    """Number of this orchestrator's requests that the group serves now."""
    is_drained: bool = False
    """True if the group receives no new requests because an operator drained it."""
    is_broken: bool = False
    """True if the group temporarily receives no new requests because attempts on it failed repeatedly."""
    generation: GenerationStatus | None = None
    """Latest status of a generation group's worker. None for a prefill group, or if the worker does not answer."""
    ranks: Mapping[int, PrefillStatus] = field(default_factory=dict)
    """Latest status of each rank of a prefill group, by rank. Ranks that do not answer are missing."""
    lender: str = ""
    """Name of the group whose worker this group uses. Empty if the group has its own workers."""

    @property
    def readiness(self) -> str:
        """Readiness of the group for new requests: yes, no, draining, drained or broken."""
        if self.is_drained:
            return "draining" if self.num_requests else "drained"
        if self.is_broken:
            return "broken"
        return "yes" if self.is_ready else "no"

    @property
    def statuses(self) -> tuple[GenerationStatus | PrefillStatus, ...]:
        """Latest statuses of the group's workers, in rank order. Workers that do not answer are omitted."""
        own = () if self.generation is None else (self.generation,)
        return (*own, *(self.ranks[rank] for rank in sorted(self.ranks)))

    @property
    def prefix_store(self) -> PrefixStoreStatus | None:
        """Status of the prefix store on the group's node, as one of the group's workers reported it. None if no worker
        reported a prefix store."""
        return next((each.prefix_store for each in self.statuses if each.HasField("prefix_store")), None)

    @property
    def imbalance(self) -> str:
        """One line that describes an inconsistency in a generation group's counts of slots or bytes. Empty if the
        counts are consistent."""
        return "" if self.generation is None else self.generation.imbalance


@dataclass(frozen=True)
class ScalingChange:
    """Decision of the autoscaler to change the number of groups. In advise mode it was only reported."""

    unix_ns: int
    """Time of the decision, in nanoseconds since the Unix epoch."""
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
    """Predicted request rate, in requests per second."""
    ttft_p95_s: float = 0.0
    """95th percentile of the time to first token in seconds, as predicted for the desired numbers of groups. Infinity
    if the groups would be overloaded; 0 without traffic."""
    itl_p95_s: float = 0.0
    """95th percentile of the time between tokens in seconds, as predicted for the desired numbers of groups. Infinity
    if the groups would be overloaded; 0 without traffic."""
    changes: tuple[ScalingChange, ...] = ()
    """Latest decisions to change the number of groups, oldest first. In advise mode they were only reported."""


@dataclass(frozen=True)
class ClusterState:
    """State of the worker groups, the request queue and the running requests, as the orchestrator sees them."""

    groups: tuple[GroupState, ...]
    num_queued: int
    num_running: int
    num_degraded: int
    """Number of degraded requests since the orchestrator started. A request is degraded if its generation group
    computed the prefill itself, because no prefill group was ready."""
    version: str
    num_queued_tokens: int = 0
    """Number of prompt tokens of all waiting requests."""
    why_not_serving: tuple[str, ...] = ()
    """Reasons why the health service reports NOT_SERVING, one line each. Empty while it reports SERVING."""
    why_degraded: tuple[str, ...] = ()
    """Reasons why the cluster serves with less than its full capacity or speed, one line each. Empty if there are no
    such reasons."""
    metrics_endpoint: str = ""
    """Address (host:port) at which Prometheus can read /metrics. Empty if metrics are not served."""
    groups_away: tuple[str, ...] = ()
    """Names of the groups that operators removed by scaling down. These groups have no workers until they are added
    again."""
    scaling: Scaling | None = None
    """Latest decision of the autoscaler. None if the autoscaler is off or has not decided yet."""


def group_state_to_proto(group: GroupState) -> pb.GroupState:
    """Convert a GroupState to a protobuf message."""
    return pb.GroupState(**vars(group))


def group_state_from_proto(message: pb.GroupState) -> GroupState:
    """Convert a protobuf message to a GroupState. The result and `message` share the status messages of the workers."""
    generation = message.generation if message.HasField("generation") else None
    endpoints = tuple(message.endpoints)
    return read(GroupState, message, endpoints=endpoints, generation=generation, ranks=dict(message.ranks))


def cluster_state_to_proto(state: ClusterState) -> pb.ClusterState:
    """Convert a ClusterState to a protobuf message."""
    groups = [group_state_to_proto(group) for group in state.groups]
    return pb.ClusterState(**vars(state) | {"groups": groups, "scaling": _scaling_to_proto(state.scaling)})


def cluster_state_from_proto(message: pb.ClusterState) -> ClusterState:
    """Convert a protobuf message to a ClusterState. Raises VersionMismatchError if the server's version is
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
