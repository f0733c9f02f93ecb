"""Implements `baton scale`: adds groups to a pool of a running cluster, or removes groups from it, one at a time.
Running requests are not interrupted. A pool consists of all groups of one role."""

import argparse
from typing import TYPE_CHECKING

from baton.errors import ConfigError, InvalidArgumentError
from deploy.commands.admin_channel import add_cluster, add_key_option, add_timeout
from deploy.options.subcommand import add_command

if TYPE_CHECKING:
    from deploy.commands.group_admin import GroupAdmin

POOLS = ("prefill", "generate")

_DESCRIPTION = """\
Sets the number of groups of a pool that receive requests. To add groups, the command first restores drained and removed
groups. Then it starts new groups, which need Ray nodes with free resources (baton_prefill or baton_generate). To remove
groups, the command drains them as `baton drain` does, the group with the fewest requests first. New requests go to the
other groups.

If the command fails or is interrupted, its changes so far remain. Repeat the command to continue."""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the `scale` command to the command line."""
    parser = add_command(commands, run, "scale", "change the number of groups of a pool", _DESCRIPTION)
    parser.add_argument("pool", choices=POOLS, help="role of the pool's groups")
    parser.add_argument("number", type=int, help="number of groups that receive requests")
    add_cluster(parser)
    add_timeout(parser, "timeout in seconds for a group to start, or to be removed (default: none)")
    add_key_option(parser)


def run(args: argparse.Namespace) -> int:
    """Run `baton scale`. Return the exit status 0 when the pool has the requested number of groups."""
    least = 1 if args.pool == "generate" else 0
    if args.number < least:
        raise InvalidArgumentError(f"{args.number} groups are too few for the pool {args.pool}: use {least} or more")
    from deploy.commands.group_admin import group_admin  # imports grpc

    with group_admin(args) as admin:
        while line := _step(admin, args.pool, args.number):
            print(line)
    print(f"{args.pool} has {args.number} group{'' if args.number == 1 else 's'} that may get work")
    return 0


def _step(admin: "GroupAdmin", pool: str, number: int) -> str:
    """Add one group to the pool or remove one. Return a line of text about the change; empty if the pool already has
    `number` groups. Raises BatonError."""
    state = admin.state()
    groups = [group for group in state.groups if group.role == pool]
    working = [group for group in groups if not group.is_drained]
    drained = [group.name for group in groups if group.is_drained]
    away = drained + [name for name in state.groups_away if name.startswith(f"{pool}-")]
    if len(working) > number:
        least = min(working, key=lambda group: (group.num_requests, -_number(group.name)))
        admin.drain(least.name, returns=True)
        return f"{least.name} has left"
    if len(working) == number:
        return ""
    if away:
        back = min(away, key=_number)
        admin.restore(back)
        return f"{back} may get work again"
    if not working:
        remedy = f"set {pool}.num_groups, and restart `baton serve`"
        raise ConfigError(f"the pool {pool} has no group to copy: {remedy}")
    return f"{admin.start_like(working[0].name)} has started"


def _number(group: str) -> int:
    return int(group.rpartition("-")[2])
