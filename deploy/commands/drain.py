"""Implements `baton drain`: sends no new work to a group of a running cluster, waits until the group has finished its
work, and then ends its workers. If --undo is given, starts the group again."""

import argparse

from deploy.commands.admin_channel import add_cluster, add_key_option, add_timeout
from deploy.options.subcommand import add_command

_DESCRIPTION = """\
Stops sending requests to a prefill or generation group, and waits until its running requests have finished. Then
removes the group: its workers exit and free their memory and Ray resources. With --keep, the workers continue to run,
idle. Other groups get the new requests. The group stays drained, even after restarts, until `baton drain --undo`.
`baton status` lists the groups.

If no generation group is left, the cluster's health is NOT_SERVING. Requests then wait for 30 seconds and fail with an
error that names the command to undo the drain. If no prefill group is left, generation groups compute the prompts."""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the `drain` command to the command line."""
    text = "remove a group once its requests have finished, or bring it back"
    parser = add_command(commands, run, "drain", text, _DESCRIPTION)
    parser.add_argument("group", help="name of the group, like generate-0")
    add_cluster(parser)
    parser.add_argument("--keep", action="store_true", help="keep the workers of the group running")
    text = "start the group again if it was removed, and send requests to it again"
    parser.add_argument("--undo", action="store_true", help=text)
    add_timeout(parser, "timeout in seconds (default: none). After it, the exit status is 1, and the drain continues")
    add_key_option(parser)


def run(args: argparse.Namespace) -> int:
    """Run `baton drain`. Return the exit status 0 when the group is drained and its workers have ended. If --keep is
    given, its workers continue to run. If --undo is given, the group is available for new work again."""
    # Imported here, so that --help and mistyped options are answered without grpc.
    from deploy.commands.group_admin import group_admin

    with group_admin(args) as admin:
        if args.undo:
            admin.restore(args.group)
            print(f"{args.group} may get work again")
            return 0
        try:
            admin.drain(args.group, keep=args.keep)
        except KeyboardInterrupt:
            print(f"{args.group} stays drained, though it is not done: `baton drain {args.group} --undo` undoes that")
            raise
    if args.keep:
        print(f"{args.group} is drained: it has nothing left to do")
    else:
        print(f"{args.group} has left: `baton drain {args.group} --undo` brings it back")
    return 0
