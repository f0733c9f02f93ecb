"""Conversion between the data that a supervisor and the orchestrator exchange, and the messages of baton.v1.Keeping.

Used by `orchestrator.api.host` and, in the supervisor, by `deploy.groups.keeper`. Does no I/O.
"""

from dataclasses import asdict, fields
from typing import Any, TypeVar

from google.protobuf.message import Message

from baton.planning.chain.partition_table import Knot, PartitionTable
from baton.planning.cost_model import CostModel, LinkModel
from baton.planning.device_profile import DeviceProfile
from baton.planning.hardware import Hardware, ModelCosts
from baton.planning.local_prefill import LocalPrefill
from baton.planning.model_shape import ModelShape
from baton.planning.planner import ChainPlanner
from baton.planning.work_cost import WorkCost
from baton.proto_types import read
from baton.results.completion import ModelInfo
from baton.v1 import common_pb2, orchestrator_pb2
from baton.v1 import keeping_pb2 as pb
from orchestrator.membership.view import AbsentGroup, ClusterView, EndedWorker, GenerationGroup, Orders, PrefillGroup

T = TypeVar("T", PrefillGroup, GenerationGroup, AbsentGroup, EndedWorker, LocalPrefill, Knot)

_SCALARS = (str, bool, int, float)


def view_to_proto(view: ClusterView) -> pb.ClusterView:
    """Return the cluster view as a message."""
    return pb.ClusterView(
        prefill=[pb.PrefillGroupView(**asdict(group)) for group in view.prefill],
        generation=[pb.GenerationGroupView(**asdict(group)) for group in view.generation],
        absent=[pb.AbsentGroup(**asdict(group)) for group in view.absent],
        ended=[pb.EndedWorker(**asdict(worker)) for worker in view.ended],
    )


def view_from_proto(message: pb.ClusterView) -> ClusterView:
    """Return the cluster view that a message contains. Each group is equal to the group that was sent, including its
    `incarnation` (key that changes when a group is repaired or replaced)."""
    return ClusterView(
        prefill=tuple(_of(PrefillGroup, group) for group in message.prefill),
        generation=tuple(_of(GenerationGroup, group) for group in message.generation),
        absent=tuple(_of(AbsentGroup, group) for group in message.absent),
        ended=tuple(_of(EndedWorker, worker) for worker in message.ended),
    )


def profile_from_proto(message: common_pb2.DeviceProfile) -> DeviceProfile:
    """Return the device profile that a worker has reported in a message. Raises ConfigError if a rate is not above
    0."""
    hardware = read(Hardware, message.hardware, link=read(LinkModel, message.hardware.link))
    return read(DeviceProfile, message, hardware=hardware)


def orders_to_proto(orders: Orders) -> pb.Orders:
    """Return operators' orders for groups, such as drains and loans of workers, as a message."""
    return pb.Orders(
        drained=sorted(orders.drained),
        leaving=sorted(orders.leaving),
        stand_ins=sorted(orders.stand_ins),
        models=orders.models,
        lent=orders.lent,
        surplus=sorted(orders.surplus),
    )


def orders_from_proto(message: pb.Orders) -> Orders:
    """Return the operators' orders for groups, such as drains and loans of workers, that a message contains."""
    return Orders(
        drained=frozenset(message.drained),
        leaving=frozenset(message.leaving),
        stand_ins=frozenset(message.stand_ins),
        models=dict(message.models),
        lent=dict(message.lent),
        surplus=frozenset(message.surplus),
    )


def model_to_proto(model: ModelInfo) -> orchestrator_pb2.Model:
    """Return the served model as a message. `baton.proto_types.model_from_proto` is the inverse function."""
    return orchestrator_pb2.Model(**asdict(model))


def predictions_to_proto(planner: ChainPlanner) -> pb.Predictions:
    """Return the data of a planner that has observed nothing as a message: nominal costs, table of chain partitions,
    limits, and data about local prefill."""
    nominal = asdict(planner.nominal)
    del nominal["prefill"]["push"]  # planners predict the time of pushing by itself
    return pb.Predictions(
        nominal=pb.ModelCosts(**nominal),
        knots=[pb.Knot(**asdict(knot)) for knots in planner.table.knots.values() for knot in knots],
        max_ranks=planner.max_ranks,
        max_tokens=planner.max_tokens,
        local=None if planner.local is None else pb.LocalPrefill(**asdict(planner.local)),
        devices=sorted(planner.devices),
    )


def planner_from_proto(message: pb.Predictions) -> ChainPlanner:
    """Return a planner that predicts exactly like the planner from which the message was made. Raises ConfigError if a
    cost in the message is out of range."""
    given = message.nominal
    costs = read(
        ModelCosts,
        given,
        shape=read(ModelShape, given.shape),
        prefill=read(CostModel, given.prefill, link=read(LinkModel, given.prefill.link), push=None),
        step=read(WorkCost, given.step),
    )
    knots: dict[int, tuple[Knot, ...]] = {}
    for knot in message.knots:
        knots[len(knot.fractions)] = (*knots.get(len(knot.fractions), ()), _of(Knot, knot))
    return ChainPlanner(
        costs,
        max_ranks=message.max_ranks,
        max_tokens=message.max_tokens,
        local=_of(LocalPrefill, message.local) if message.HasField("local") else None,
        table=PartitionTable(knots),
        devices=frozenset(message.devices),
    )


def _of(kind: type[T], message: Message) -> T:
    """Return a value of type `kind` whose fields are read from the message's fields of the same names."""
    values: dict[str, Any] = {}
    for field in fields(kind):
        value = getattr(message, field.name)
        if isinstance(value, common_pb2.DeviceProfile):
            values[field.name] = profile_from_proto(value) if message.HasField(field.name) else None
            continue
        values[field.name] = value if isinstance(value, _SCALARS) else tuple(value)
    return kind(**values)
