"""`baton flip`: lets a worker of a running cluster change its role, from prefill to generation or back, with its model
still loaded. With --undo it goes back."""

import argparse
from typing import TYPE_CHECKING

from baton.errors import UnavailableError
from deploy.commands.admin_channel import TARGET_HELP, add_key_option, admin_channel, given_key
from deploy.commands.drain import left_of
from deploy.options.command import add_command
from deploy.options.numbers import check_timeout

if TYPE_CHECKING:
    from baton.cluster_state import GroupState
    from baton.v1.admin_pb2_grpc import AdminStub

_DESCRIPTION = """\
Lets a group lend its last worker, which serves in the other role as a group of its own: a rank of a chain as a
generation group, a generation group as a chain of one rank. The worker's process goes on, and its model stays loaded,
so this takes far less time than the start of a group. First the group finishes what it has, while requests go to
others; then a chain goes on with one rank less, and a group whose only worker is lent is gone until that comes back.

With --undo the worker goes back. The group that has borrowed it finishes what it has, and so does the chain that it
joins. `baton drain` of the group that has borrowed it does the same.

No request is lost. The last group that generates is refused. A worker that does not serve in its new role goes back,
and the exit status is 1."""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the `flip` command to the command line."""
    parser = add_command(commands, "flip", "let a worker change between prefill and generation", _DESCRIPTION)
    parser.add_argument("group", help="its name, like prefill-0")
    parser.add_argument("name", nargs="?", default="baton", help="the cluster's name (default: baton)")
    parser.add_argument("--target", metavar="HOST:PORT", help=TARGET_HELP)
    parser.add_argument(
        "--undo",
        action="store_true",
        help="return the worker that the group has borrowed, or the last that it has lent",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        metavar="SECONDS",
        help="wait no longer than this (default: until it is done); what was ordered goes on, the exit status is 1",
    )
    add_key_option(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run `baton flip`; return the exit status: 0 once the worker serves in its other role."""
    check_timeout(args.timeout)
    # Imported here, so that --help and mistyped options are answered without grpc.
    from baton.v1.admin_pb2_grpc import AdminStub
    from deploy.commands.record import secret_for, serving_endpoint

    target = args.target or serving_endpoint(args.name)
    with admin_channel(target, secret_for(args.target, args.name), given_key(args)) as channel:
        state = flip(AdminStub(channel), args.group, undo=args.undo, timeout_s=args.timeout)
    if state is None:
        print(f"{args.group} has no worker of another group any more")
    elif state.lender:
        print(f"{state.name} serves with a worker of {state.lender}: `baton flip {state.name} --undo` returns it")
    else:
        print(f"{state.name} has its worker again")
    return 0


def flip(stub: "AdminStub", group: str, *, undo: bool, timeout_s: float | None) -> "GroupState | None":
    """Let the group lend a worker, or `undo` that, and show the progress; return the state of the group that serves
    with the worker, None when the worker has ended with its own group. Raises UnavailableError when that is not done
    within `timeout_s` seconds."""
    from rich.console import Console

    from baton.cluster_state import group_state_from_proto
    from baton.errors import DeadlineExceededError
    from baton.status import translate_rpc_errors
    from baton.v1 import admin_pb2

    state: GroupState | None = None
    request = admin_pb2.FlipRequest(group=group, undo=undo)
    try:
        with Console(stderr=True).status(f"changing a role at {group}") as status, translate_rpc_errors():
            for message in stub.Flip(request, timeout=timeout_s):
                state = group_state_from_proto(message)
                status.update(f"draining {state.name}: {left_of(state)}")
    except DeadlineExceededError as error:
        raise UnavailableError(
            f"no role has changed at {group} after {timeout_s:g} s: what was ordered goes on, see `baton status`"
        ) from error
    return None if state is None or state.is_drained else state
