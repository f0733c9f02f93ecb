"""Serves operators' requests about groups over gRPC: drain, undrain, start a stand-in, and change a worker's role.

The server's half of `baton drain`, `baton reload` and `baton flip`; calls `orchestrator.observability.state`. On the
process's asyncio loop.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import grpc

from baton.cluster_state import group_state_to_proto
from baton.errors import InvalidArgumentError
from baton.v1 import admin_pb2 as pb
from baton.v1 import admin_pb2_grpc, orchestrator_pb2
from orchestrator.observability.state import Overview

Context = grpc.aio.ServicerContext[Any, Any]

SERVICE = pb.DESCRIPTOR.services_by_name["Admin"].full_name


class AdminServicer(admin_pb2_grpc.AdminServicer):
    """Serves baton.v1.Admin over the controller's Overview."""

    def __init__(self, overview: Overview, model_folders: Sequence[Path] | None = None) -> None:
        """`model_folders`: folders below which a model must lie that a call names; None: it may lie anywhere."""
        self._overview = overview
        self._model_folders = model_folders

    async def Drain(self, request: pb.DrainRequest, context: Context) -> AsyncIterator[orchestrator_pb2.GroupState]:
        """Drain a group, and stream its state until it has no work left or, if it is to leave, has no workers.

        The group stays drained if the call is given up.
        """
        async with aclosing(self._overview.drain(request.group, leave=request.leave)) as states:
            async for state in states:
                yield group_state_to_proto(state)

    async def Undrain(self, request: pb.UndrainRequest, context: Context) -> orchestrator_pb2.GroupState:
        """Let a group get work again, starting it first if it has left, and return its state.

        Raises InvalidArgumentError for a model outside the allowed folders, before any file of it is read.
        """
        if request.model and self._model_folders is not None:
            await asyncio.to_thread(_require_below, self._model_folders, request.model)
        return group_state_to_proto(await self._overview.undrain(request.group, request.model))

    async def StandIn(self, request: pb.StandInRequest, context: Context) -> orchestrator_pb2.GroupState:
        """Start a group beside the named one, and return its state."""
        return group_state_to_proto(await self._overview.stand_in(request.group))

    async def Flip(self, request: pb.FlipRequest, context: Context) -> AsyncIterator[orchestrator_pb2.GroupState]:
        """Let the last worker of a group serve in the other role, or go back, and stream the states of the groups that
        have to finish their work before, and at last that of the group that serves then."""
        flipping = self._overview.unflip(request.group) if request.undo else self._overview.flip(request.group)
        async with aclosing(flipping) as states:
            async for state in states:
                yield group_state_to_proto(state)


def _require_below(folders: Sequence[Path], model: str) -> None:
    """Raise InvalidArgumentError unless the model's folder, links followed, is in one of these folders. Blocks."""
    if not _is_below(folders, Path(model)):
        named = " or ".join(str(each) for each in folders) or "no folder at all"
        raise InvalidArgumentError(
            f"model = {model[:200]!r} is not in {named}: use a model there, or set orchestrator.model_folders"
        )


def _is_below(folders: Sequence[Path], model: Path) -> bool:
    try:
        resolved = model.resolve()
    except (OSError, RuntimeError, ValueError):  # links in a circle, or no path at all
        return False
    return model.is_absolute() and any(resolved.is_relative_to(each.resolve()) for each in folders)
