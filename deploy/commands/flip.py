"""Implements `baton flip`: changes the role of a worker of a running cluster, from prefill to generation or the
reverse. The model stays loaded. If --undo is given, the worker returns to its former role."""

import argparse

from deploy.commands.admin_channel import add_cluster, add_key_option, add_timeout
from deploy.options.subcommand import add_command

_DESCRIPTION = """\
Lends a group's last worker to the other role, where it serves as a group of its own: a rank of a chain becomes a
generation group, a generation group becomes a chain of one rank. The worker's process keeps running with its model
loaded, so this takes far less time than the start of a group. First the lending group finishes its requests, while new
ones go to other groups. Then a chain continues with one rank less; a group whose only worker is lent does not exist
until the worker returns.

With --undo the worker returns, after the group that borrowed it and the chain that it joins have finished their
requests. `baton drain` of the group that borrowed the worker does the same.

No request is lost. The last generation group cannot be flipped. A worker that fails to serve in its new role returns,
and the exit status is 1."""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the `flip` command to the command line."""
    parser = add_command(commands, run, "flip", "move a worker between prefill and generation", _DESCRIPTION)
    parser.add_argument("group", help="name of the group, like prefill-0")
    add_cluster(parser)
    parser.add_argument(
        "--undo",
        action="store_true",
        help="return the worker that the group borrowed, or the last one that it lent",
    )
    add_timeout(
        parser, "maximum time to wait (default: no limit); after it the flip continues and the exit status is 1"
    )
    add_key_option(parser)


def run(args: argparse.Namespace) -> int:
    """Run `baton flip`. Return the exit status 0 when the worker serves in its new role."""
    # Imported here, so that --help and mistyped options are answered without grpc.
    from deploy.commands.group_admin import group_admin

    with group_admin(args) as admin:
        state = admin.flip(args.group, undo=args.undo)
    if state is None:
        print(f"{args.group} has no worker of another group any more")
    elif state.lender:
        print(f"{state.name} serves with a worker of {state.lender}: `baton flip {state.name} --undo` returns it")
    else:
        print(f"{state.name} has its worker again")
    return 0
