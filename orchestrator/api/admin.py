"""Serves operators over gRPC: drain and undrain a group, start a stand-in, change a worker's role, and get the trace of
an ended request.

It is the server side of `baton drain`, `baton reload`, `baton flip` and `baton trace`. Calls
`orchestrator.actuation.operations`. A stand-in is a group that is started in addition to the configured groups. Runs on
the process's event loop.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import grpc

from baton.calls.cluster_state import group_state_to_proto
from baton.errors import InvalidArgumentError, NotFoundError
from baton.proto_types import finish_from_proto, finish_to_proto, read, timings_from_proto, timings_to_proto
from baton.results.completion import Usage
from baton.v1 import admin_pb2 as pb
from baton.v1 import admin_pb2_grpc, orchestrator_pb2
from orchestrator.actuation.operations import GroupOperations
from orchestrator.observability.stages import Trace
from orchestrator.observability.traces import NUM_KEPT, Traces
from orchestrator.requests.record import FailedAttempt

Context = grpc.aio.ServicerContext[Any, Any]

SERVICE = pb.DESCRIPTOR.services_by_name["Admin"].full_name


class AdminServicer(admin_pb2_grpc.AdminServicer):
    """Serves baton.v1.Admin, using the operations on groups."""

    def __init__(
        self, operations: GroupOperations, traces: Traces, model_folders: Sequence[Path] | None = None
    ) -> None:
        """`model_folders`: folders that must contain every model that a call names. None: a model may be in any
        folder."""
        self._operations = operations
        self._traces = traces
        self._model_folders = model_folders

    async def Drain(self, request: pb.DrainRequest, context: Context) -> AsyncIterator[orchestrator_pb2.GroupState]:
        """Drain a group, and stream its state until it has no work left. If `request.leave` is set, stream its state
        until its workers have been stopped.

        The group stays drained if the call is cancelled.
        """
        draining = self._operations.drain(request.group, leave=request.leave, returns=request.returns)
        async with aclosing(draining) as states:
            async for state in states:
                yield group_state_to_proto(state)

    async def Undrain(self, request: pb.UndrainRequest, context: Context) -> orchestrator_pb2.GroupState:
        """Allow new work for a drained group again, and return its state. If the group's workers have been stopped,
        they are started first, with the model `request.model` if it is given.

        Raises InvalidArgumentError if `request.model` is not in one of the allowed folders. This is checked before any
        file of the model is read.
        """
        if request.model and self._model_folders is not None:
            await asyncio.to_thread(_require_below, self._model_folders, request.model)
        return group_state_to_proto(await self._operations.undrain(request.group, request.model))

    async def StandIn(self, request: pb.StandInRequest, context: Context) -> orchestrator_pb2.GroupState:
        """Start a stand-in, which is an additional group of the same kind as the named group. Return the stand-in's
        state."""
        return group_state_to_proto(await self._operations.stand_in(request.group))

    async def Flip(self, request: pb.FlipRequest, context: Context) -> AsyncIterator[orchestrator_pb2.GroupState]:
        """Move a worker of a group to the other role or, if `request.undo` is set, return a moved worker to its group.
        Stream the states of the groups that must finish their work first, and finally the state of the group that has
        the worker afterwards."""
        flipping = self._operations.unflip(request.group) if request.undo else self._operations.flip(request.group)
        async with aclosing(flipping) as states:
            async for state in states:
                yield group_state_to_proto(state)

    async def GetTrace(self, request: pb.GetTraceRequest, context: Context) -> pb.Trace:
        """Return the trace of an ended request. Raises NotFoundError if this orchestrator never had the trace, or has
        dropped it."""
        trace = self._traces.get(request.request_id)
        if trace is None:
            raise NotFoundError(
                f"request {request.request_id[:200]!r} is not among the latest {NUM_KEPT} that have ended: a request "
                "is kept from its end on, under its id in the orchestrator's log"
            )
        return trace_to_proto(trace)


def trace_to_proto(trace: Trace) -> pb.Trace:
    """Return a request's trace as a message."""
    return pb.Trace(
        request_id=trace.request_id,
        usage=orchestrator_pb2.Usage(**vars(trace.usage)),
        timings=timings_to_proto(trace.timings),
        reasons=[finish_to_proto(reason) for reason in trace.reasons],
        error=trace.error,
        failures=[pb.FailedAttempt(**vars(failure)) for failure in trace.failures],
    )


def trace_from_proto(message: pb.Trace) -> Trace:
    """Return the trace in a message. Raises InvalidArgumentError if the token range of a rank ends before it starts."""
    reasons = (finish_from_proto(each) for each in message.reasons)
    return Trace(
        request_id=message.request_id,
        usage=read(Usage, message.usage),
        timings=timings_from_proto(message.timings),
        reasons=tuple(reason for reason in reasons if reason is not None),
        error=message.error,
        failures=tuple(read(FailedAttempt, each) for each in message.failures),
    )


def _require_below(folders: Sequence[Path], model: str) -> None:
    """Raise InvalidArgumentError if the model's folder, after resolving links, is in none of these folders. Blocks."""
    try:
        resolved = Path(model).resolve()
        is_below = Path(model).is_absolute() and any(resolved.is_relative_to(each.resolve()) for each in folders)
    except (OSError, RuntimeError, ValueError):  # circular links, or not a valid path
        is_below = False
    if not is_below:
        named = " or ".join(str(each) for each in folders) or "no folder at all"
        raise InvalidArgumentError(
            f"model = {model[:200]!r} is not in {named}: use a model there, or set orchestrator.model_folders"
        )
