"""The state of a cluster and of its groups, as values and as messages. Safe to share between threads.

What a worker says of itself is not converted: a GroupState holds the worker's own message, which must not change.
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
    """One group of workers: what the orchestrator knows of it, and what its workers say of themselves."""

    name: str
    role: str
    """Role of the group: prefill or generate."""
    endpoints: tuple[str, ...]
    """Address of each rank, host:port."""
    epoch: int
    is_ready: bool
    """Whether new work may go to the group."""
    num_leaked: int
    """Slots or jobs held for over 2 s by no request that the orchestrator knows."""
    num_requests: int
    """Requests of this orchestrator that the group serves."""
    is_drained: bool = False
    """Whether the group gets no new work because an operator drained it."""
    is_broken: bool = False
    """Whether the group gets no new work for a while, because attempts there failed again and again."""
    generation: GenerationStatus | None = None
    """What a generation group said last; None for a prefill group, and while the group does not answer."""
    ranks: Mapping[int, PrefillStatus] = field(default_factory=dict)
    """What the ranks of a prefill group said last, by rank; those that do not answer are missing."""
    lender: str = ""
    """Name of the group from which the group has borrowed its worker; empty when its workers are its own."""

    @property
    def readiness(self) -> str:
        """One word that says whether the group gets work, or why it gets none: yes, no, draining, drained or broken."""
        if self.is_drained:
            return "draining" if self.num_requests else "drained"
        if self.is_broken:
            return "broken"
        return "yes" if self.is_ready else "no"

    @property
    def statuses(self) -> tuple[GenerationStatus | PrefillStatus, ...]:
        """What the group's workers said last, in rank order, without those that do not answer."""
        own = () if self.generation is None else (self.generation,)
        return (*own, *(self.ranks[rank] for rank in sorted(self.ranks)))

    @property
    def prefix_store(self) -> PrefixStoreStatus | None:
        """The prefix store of the group's node, as one of its workers reported it; None where there is none."""
        return next((each.prefix_store for each in self.statuses if each.HasField("prefix_store")), None)

    @property
    def imbalance(self) -> str:
        """Why slots or bytes of a generation group do not add up, in one line for people; empty when they do."""
        return "" if self.generation is None else self.generation.imbalance


@dataclass(frozen=True)
class ScalingChange:
    """A decision of the autoscaler that changed groups, or would have."""

    unix_ns: int
    """Instant of the decision, in unix nanoseconds."""
    explanation: str
    """The decision with its terms, in one line for people."""


@dataclass(frozen=True)
class Scaling:
    """The autoscaler's latest decision."""

    mode: str
    """Whether decisions are carried out (act), or only reported (advise)."""
    num_prefill: int
    """Prefill groups that there are to be."""
    num_generate: int
    """Generation groups that there are to be."""
    explanation: str
    """The decision with its terms, in one line for people."""
    forecast_rate: float = 0.0
    """Requests a second that are forecast."""
    ttft_p95_s: float = 0.0
    """95th percentile of the time to first token that is predicted for these groups, in seconds; infinite in an
    overload, 0 without traffic."""
    itl_p95_s: float = 0.0
    """95th percentile of the time between tokens that is predicted for these groups, in seconds, likewise."""
    changes: tuple[ScalingChange, ...] = ()
    """The latest decisions that changed groups, or would have, oldest first."""


@dataclass(frozen=True)
class ClusterState:
    """Groups, queue and slots, as the orchestrator sees them."""

    groups: tuple[GroupState, ...]
    num_queued: int
    num_running: int
    num_degraded: int
    """Requests so far whose generation group prefilled by itself because no prefill group was ready."""
    version: str
    num_queued_tokens: int = 0
    """Prompt tokens of the requests that wait."""
    why_not_serving: tuple[str, ...] = ()
    """Why the health service says NOT_SERVING, one line a reason; empty while it says SERVING."""
    why_degraded: tuple[str, ...] = ()
    """Why the cluster serves worse than it could, one line a reason; empty while it does not."""
    metrics_endpoint: str = ""
    """Address, host:port, at which Prometheus finds /metrics; empty when there is none."""
    groups_away: tuple[str, ...] = ()
    """Names of the groups that operators let leave: they have no workers until they are wanted again."""
    scaling: Scaling | None = None
    """What the autoscaler wants, and why; None while it is off, or has not decided yet."""


def group_state_to_proto(group: GroupState) -> pb.GroupState:
    """Return the state of one group as a message."""
    return pb.GroupState(**vars(group))


def group_state_from_proto(message: pb.GroupState) -> GroupState:
    """Return the message's state of one group, which shares the workers' statuses with the message."""
    generation = message.generation if message.HasField("generation") else None
    endpoints = tuple(message.endpoints)
    return read(GroupState, message, endpoints=endpoints, generation=generation, ranks=dict(message.ranks))


def cluster_state_to_proto(state: ClusterState) -> pb.ClusterState:
    """Return the state of groups, queue and slots as a message."""
    groups = [group_state_to_proto(group) for group in state.groups]
    return pb.ClusterState(**vars(state) | {"groups": groups, "scaling": _scaling_to_proto(state.scaling)})


def cluster_state_from_proto(message: pb.ClusterState) -> ClusterState:
    """Return the message's state of the cluster. Raises VersionMismatchError for an incompatible server's."""
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
