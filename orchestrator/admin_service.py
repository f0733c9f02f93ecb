"""What operators ask of a running cluster, over gRPC: that a group gets no new work, or leaves, or comes back.

The other half of `baton drain` and `baton reload`. On the process's asyncio loop.
"""

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc

from baton.proto_types import group_state_to_proto
from baton.v1 import admin_pb2 as pb
from baton.v1 import admin_pb2_grpc, orchestrator_pb2
from orchestrator.overview import Overview

Context = grpc.aio.ServicerContext[Any, Any]

SERVICE = pb.DESCRIPTOR.services_by_name["Admin"].full_name


class AdminServicer(admin_pb2_grpc.AdminServicer):
    """Serves baton.v1.Admin over what the controller oversees."""

    def __init__(self, overview: Overview) -> None:
        self._overview = overview

    async def Drain(self, request: pb.DrainRequest, context: Context) -> AsyncIterator[orchestrator_pb2.GroupState]:
        """Streams how the group stands until it has nothing left to do, or has left, if it is to; it stays drained if
        the call is given up."""
        async with aclosing(self._overview.drain(request.group, leave=request.leave)) as states:
            async for state in states:
                yield group_state_to_proto(state)

    async def Undrain(self, request: pb.UndrainRequest, context: Context) -> orchestrator_pb2.GroupState:
        """How the group stands, which may get work again; one that has left is started first."""
        return group_state_to_proto(await self._overview.undrain(request.group, request.model))

    async def StandIn(self, request: pb.StandInRequest, context: Context) -> orchestrator_pb2.GroupState:
        """How the group stands that was started beside the one named."""
        return group_state_to_proto(await self._overview.stand_in(request.group))
