"""Drains, restores, flips and adds groups of a running cluster for the commands. Each operation is a call of the
orchestrator's service `Admin` that returns when the operation is complete; its progress is shown on standard error.
Blocks."""

import argparse
import contextlib
from collections.abc import Callable, Iterator

import grpc
from rich.console import Console

from baton.calls.cluster_state import ClusterState, GroupState, cluster_state_from_proto, group_state_from_proto
from baton.errors import DeadlineExceededError, UnavailableError
from baton.rpc_status import translate_rpc_errors
from baton.v1 import admin_pb2
from baton.v1.admin_pb2_grpc import AdminStub
from baton.v1.orchestrator_pb2 import GetClusterStateRequest
from baton.v1.orchestrator_pb2 import GroupState as GroupMessage
from baton.v1.orchestrator_pb2_grpc import OrchestratorStub
from deploy.commands.admin_channel import cluster_channel
from deploy.options.numbers import check_timeout

_ANSWER_S = 10.0


class GroupAdmin:
    """Sends orders to the groups of the cluster at the other end of `channel`. If an order takes longer than
    `timeout_s` seconds (None: no limit), a BatonError is raised, and the cluster continues with the order."""

    def __init__(self, channel: grpc.Channel, timeout_s: float | None) -> None:
        self._admin = AdminStub(channel)
        self._orchestrator = OrchestratorStub(channel)
        self._timeout_s = timeout_s

    def state(self) -> ClusterState:
        """Return the state of the cluster. Raises VersionMismatchError if the orchestrator is incompatible, and
        grpc.RpcError if it does not answer within 10 s."""
        answer = self._orchestrator.GetClusterState(GetClusterStateRequest(), timeout=_ANSWER_S)
        return cluster_state_from_proto(answer)

    def drain(self, group: str, *, keep: bool = False, returns: bool = False) -> None:
        """Drain the group. If `keep` is false, end its workers afterwards. If `returns` is true, the caller must later
        start this group again, or a replacement for it. In this case, a request that finds all groups drained during
        the call waits instead of failing. Raises UnavailableError if another command undoes the drain before it is
        complete."""
        request = admin_pb2.DrainRequest(group=group, leave=not keep, returns=returns)
        late = "{group} is not done after {time_s:g} s{left}: it stays drained; wait on, or --undo"
        state = self._followed(self._admin.Drain, request, f"draining {group}", late)
        if state is not None and not state.is_drained:
            raise UnavailableError(f"{group} was let have work again meanwhile: it is not drained")

    def restore(self, group: str, *, model: str = "") -> None:
        """Make the group available for new work again, with the model in the folder `model` if `model` is not empty.
        Raises UnavailableError if the group cannot be started."""
        try:
            with Console(stderr=True).status(f"waiting for {group}"), translate_rpc_errors():
                self._admin.Undrain(admin_pb2.UndrainRequest(group=group, model=model), timeout=self._timeout_s)
        except DeadlineExceededError as error:
            late = f"{group} is not ready after {self._timeout_s:g} s: it continues to start"
            raise UnavailableError(late) from error

    def flip(self, group: str, *, undo: bool) -> GroupState | None:
        """Lend a worker of the group to a new group of the other role. If `undo` is true, return a worker to the group
        that owns it instead: the worker that this group has borrowed, or one that it has lent. A worker that this group
        has borrowed is also returned if `undo` is false. Return the state of the group in which the worker then serves.
        Return None if the worker was ended instead of returned, because the owning group was ordered to end."""
        request = admin_pb2.FlipRequest(group=group, undo=undo)
        late = "the role of {group} has not changed after {time_s:g} s: the flip continues, see `baton status`"
        state = self._followed(self._admin.Flip, request, f"changing a role at {group}", late)
        return None if state is None or state.is_drained else state

    def start_like(self, group: str) -> str:
        """Start another group like `group`, and return its name."""
        with Console(stderr=True).status(f"starting another group like {group}"), translate_rpc_errors():
            return str(self._admin.StandIn(admin_pb2.StandInRequest(group=group), timeout=self._timeout_s).name)

    def _followed(
        self,
        call: Callable[..., Iterator[GroupMessage]],
        request: admin_pb2.DrainRequest | admin_pb2.FlipRequest,
        shown: str,
        late: str,
    ) -> GroupState | None:
        """Make a call that streams the states of a draining group; return the last one. `late` is the message of the
        UnavailableError if the call takes too long."""
        state: GroupState | None = None
        try:
            with Console(stderr=True).status(shown) as status, translate_rpc_errors():
                for message in call(request, timeout=self._timeout_s):
                    state = group_state_from_proto(message)
                    status.update(f"draining {state.name}: {left_of(state)}")
        except DeadlineExceededError as error:
            left = "" if state is None else f", with {left_of(state)}"
            raise UnavailableError(late.format(group=request.group, time_s=self._timeout_s, left=left)) from error
        return state


@contextlib.contextmanager
def group_admin(args: argparse.Namespace) -> Iterator[GroupAdmin]:
    """Connect to the cluster that the command's options name, and yield its GroupAdmin. Raises what `cluster_channel`
    raises, and InvalidArgumentError for a timeout that is out of range."""
    check_timeout(args.timeout)
    with cluster_channel(args) as channel:
        yield GroupAdmin(channel, args.timeout)


def left_of(state: GroupState) -> str:
    """Return the unfinished work of a group as readable text: its number of requests, and for a generation group its
    number of occupied slots."""
    requests = f"{state.num_requests} request{'' if state.num_requests == 1 else 's'}"
    if (held := state.generation) is None:
        return requests
    return f"{requests}, {held.num_slots - held.num_free} of {held.num_slots} slots"
