"""`baton drain`: sends no new work to a group of a running cluster, waits until the group has finished its work, and
then ends its workers. With --undo it starts the group again."""

import argparse
from typing import TYPE_CHECKING

from baton.errors import UnavailableError
from deploy.commands.admin_channel import add_cluster, add_key_option, add_timeout, cluster_channel
from deploy.options.numbers import check_timeout
from deploy.options.subcommand import add_command

if TYPE_CHECKING:
    from baton.calls.cluster_state import GroupState
    from baton.v1.admin_pb2_grpc import AdminStub

_DESCRIPTION = """\
Keeps new requests from a prefill or generation group and waits until its running requests have finished. Requests that
arrive meanwhile go to other groups, or wait. Then the group is removed: its workers exit and free their memory and Ray
resources. With --keep the workers stay up, idle. The group stays drained after any restart, until `baton drain --undo`.
`baton status` lists the groups.

Without a generation group, the cluster's health is NOT_SERVING and requests fail after 30 seconds, with the
command that undoes the drain. Without a prefill group, generation groups compute prompts themselves."""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the `drain` command to the command line."""
    text = "remove a group once its requests have finished, or bring it back"
    parser = add_command(commands, "drain", text, _DESCRIPTION)
    parser.add_argument("group", help="name of the group, like generate-0")
    add_cluster(parser)
    parser.add_argument("--keep", action="store_true", help="keep the group's workers running, idle")
    parser.add_argument(
        "--undo", action="store_true", help="send requests to the group again; start it first if it was removed"
    )
    add_timeout(
        parser, "maximum time to wait (default: no limit); after it the drain continues and the exit status is 1"
    )
    add_key_option(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run `baton drain`; return the exit status: 0 once the group has left the cluster, is drained, or may get new work
    again."""
    check_timeout(args.timeout)
    # Imported here, so that --help and mistyped options are answered without grpc.
    from baton.v1.admin_pb2_grpc import AdminStub

    with cluster_channel(args) as channel:
        stub = AdminStub(channel)
        if args.undo:
            restore(stub, args.group, timeout_s=args.timeout)
            print(f"{args.group} may get work again")
            return 0
        try:
            withdraw(stub, args.group, keep=args.keep, timeout_s=args.timeout)
        except KeyboardInterrupt:
            print(f"{args.group} stays drained, though it is not done: `baton drain {args.group} --undo` undoes that")
            raise
    if args.keep:
        print(f"{args.group} is drained: it has nothing left to do")
    else:
        print(f"{args.group} has left: `baton drain {args.group} --undo` brings it back")
    return 0


def withdraw(
    stub: "AdminStub", group: str, *, keep: bool = False, returns: bool = False, timeout_s: float | None
) -> None:
    """Drain the group and show the progress. Then end its workers, unless `keep` is true. `returns` is true if the
    caller will start this group or another one again afterwards. Raises UnavailableError if the group has not finished
    within `timeout_s` seconds, or if another command undoes the drain meanwhile."""
    from rich.console import Console

    from baton.calls.cluster_state import group_state_from_proto
    from baton.errors import DeadlineExceededError
    from baton.rpc_status import translate_rpc_errors
    from baton.v1 import admin_pb2

    state: GroupState | None = None
    request = admin_pb2.DrainRequest(group=group, leave=not keep, returns=returns)
    try:
        with Console(stderr=True).status(f"draining {group}") as status, translate_rpc_errors():
            for message in stub.Drain(request, timeout=timeout_s):
                state = group_state_from_proto(message)
                status.update(f"draining {group}: {left_of(state)}")
    except DeadlineExceededError as error:
        left = "" if state is None else f", with {left_of(state)}"
        raise UnavailableError(
            f"{group} is not done after {timeout_s:g} s{left}: it stays drained; wait on, or --undo"
        ) from error
    if state is not None and not state.is_drained:
        raise UnavailableError(f"{group} was let have work again meanwhile: it is not drained")


def restore(stub: "AdminStub", group: str, *, timeout_s: float | None, model: str = "") -> None:
    """Make the group available for new work again, with the model in the folder `model` if `model` is not empty. Raises
    UnavailableError if the group cannot be started, or does not start within `timeout_s` seconds."""
    from rich.console import Console

    from baton.errors import DeadlineExceededError
    from baton.rpc_status import translate_rpc_errors
    from baton.v1 import admin_pb2

    try:
        with Console(stderr=True).status(f"waiting for {group}"), translate_rpc_errors():
            stub.Undrain(admin_pb2.UndrainRequest(group=group, model=model), timeout=timeout_s)
    except DeadlineExceededError as error:
        raise UnavailableError(f"{group} is not ready after {timeout_s:g} s: it continues to start") from error


def left_of(state: "GroupState") -> str:
    """Return the number of requests and slots that a group still holds, as readable text."""
    requests = f"{state.num_requests} request{'' if state.num_requests == 1 else 's'}"
    if (held := state.generation) is None:
        return requests
    return f"{requests}, {held.num_slots - held.num_free} of {held.num_slots} slots"
