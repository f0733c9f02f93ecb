"""`baton scale`: gives a pool of a running cluster more groups or fewer, one at a time, without losing a request."""

import argparse
from typing import TYPE_CHECKING

from baton.errors import ConfigError, InvalidArgumentError
from deploy.commands.admin_channel import TARGET_HELP, add_key_option, admin_channel, ask_state, given_key
from deploy.commands.drain import restore, withdraw
from deploy.options.command import add_command
from deploy.options.numbers import check_timeout

if TYPE_CHECKING:
    import grpc

    from baton.calls.cluster_state import GroupState

POOLS = ("prefill", "generate")

_DESCRIPTION = """\
Sets the number of groups of a pool that receive requests. To grow, drained and removed groups come back first. Then new
groups start, which need free resources: Ray nodes that declare enough of the pool's resource. To shrink, groups finish
their requests and are removed, as with `baton drain`, the group with the least work first. Requests that arrive
meanwhile go to the other groups.

If the command fails or is interrupted, groups that have started stay: repeat the command to continue."""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the `scale` command to the command line."""
    parser = add_command(commands, "scale", "change the number of groups of a pool", _DESCRIPTION)
    parser.add_argument("pool", choices=POOLS, help="role of the pool's groups")
    parser.add_argument("number", type=int, help="number of groups that receive requests")
    parser.add_argument("name", nargs="?", default="baton", help="the cluster's name (default: baton)")
    parser.add_argument("--target", metavar="HOST:PORT", help=TARGET_HELP)
    parser.add_argument(
        "--timeout",
        type=float,
        metavar="SECONDS",
        help="maximum time to wait for a group to start, or to be removed (default: no limit)",
    )
    add_key_option(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run `baton scale`; return the exit status: 0 once the pool has that many groups."""
    least = 1 if args.pool == "generate" else 0
    if args.number < least:
        raise InvalidArgumentError(f"{args.number} groups are too few for the pool {args.pool}: use {least} or more")
    check_timeout(args.timeout)
    # Imported here, so that --help and mistyped options are answered without grpc.
    from deploy.commands.record import secret_for, serving_endpoint

    target = args.target or serving_endpoint(args.name)
    with admin_channel(target, secret_for(args.target, args.name), given_key(args)) as channel:
        scaling = _Scaling(channel, args.pool, args.timeout)
        while line := scaling.step(args.number):
            print(line)
    print(f"{args.pool} has {args.number} group{'' if args.number == 1 else 's'} that may get work")
    return 0


class _Scaling:
    """Brings one pool towards a number of groups, a group at a time."""

    def __init__(self, channel: "grpc.Channel", pool: str, timeout_s: float | None) -> None:
        from baton.v1.admin_pb2_grpc import AdminStub

        self._admin = AdminStub(channel)
        self._channel = channel
        self._pool = pool
        self._timeout_s = timeout_s

    def step(self, number: int) -> str:
        """Start a group or let one leave; return a line about it, empty once there are `number`. Raises BatonError."""
        state = ask_state(self._channel)
        groups = [group for group in state.groups if group.role == self._pool]
        working = [group for group in groups if not group.is_drained]
        drained = [group.name for group in groups if group.is_drained]
        away = drained + [name for name in state.groups_away if name.startswith(f"{self._pool}-")]
        if len(working) > number:
            least = min(working, key=lambda group: (group.num_requests, -_number(group.name)))
            withdraw(self._admin, least.name, returns=True, timeout_s=self._timeout_s)
            return f"{least.name} has left"
        if len(working) == number:
            return ""
        if away:
            back = min(away, key=_number)
            restore(self._admin, back, timeout_s=self._timeout_s)
            return f"{back} may get work again"
        if not working:
            remedy = f"set {self._pool}.num_groups, and restart `baton serve`"
            raise ConfigError(f"the pool {self._pool} has no group to copy: {remedy}")
        return f"{self._start_like(working[0])} has started"

    def _start_like(self, group: "GroupState") -> str:
        from rich.console import Console

        from baton.v1 import admin_pb2

        with Console(stderr=True).status(f"starting another group like {group.name}"):
            return str(self._admin.StandIn(admin_pb2.StandInRequest(group=group.name), timeout=self._timeout_s).name)


def _number(group: str) -> int:
    return int(group.rpartition("-")[2])
