"""Implements `baton flip`: changes the role of a worker of a running cluster, from prefill to generation or the
reverse. The model stays loaded. If --undo is given, the worker returns to its former role."""

import argparse

from deploy.commands.admin_channel import add_cluster, add_key_option, add_timeout
from deploy.options.subcommand import add_command

_DESCRIPTION = """\
Moves the last worker of a group to the other role, in which the worker is a new group: a prefill rank becomes a
generation group, and a generation engine becomes a prefill group of one rank. The worker's process continues to run and
keeps its model loaded, so a flip takes much less time than the start of a group.

Before the flip, the group finishes its requests, and new requests go to other groups. After the flip, a prefill group
continues with one rank less. A group whose only worker has moved does not exist until the worker returns. No request is
lost. The last generation group cannot be flipped.

--undo returns the worker to its first group. Both groups finish their requests before that. `baton drain` of the new
group has the same effect.

If a worker fails to serve in its new role, it returns, and the exit status is 1."""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the `flip` command to the command line."""
    parser = add_command(commands, run, "flip", "move a worker between prefill and generation", _DESCRIPTION)
    parser.add_argument("group", help="name of the group, like prefill-0")
    add_cluster(parser)
    text = "return a moved worker to its first group; GROUP is the first or the new group of the worker"
    parser.add_argument("--undo", action="store_true", help=text)
    add_timeout(parser, "timeout in seconds (default: none). After it, the exit status is 1, and the flip continues")
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
