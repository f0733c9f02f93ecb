"""Implements `baton reload`: replaces the workers of a running cluster, one group at a time, while the other groups
serve."""

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from baton.errors import BatonError, UnavailableError
from deploy.commands.admin_channel import add_cluster, add_key_option, add_timeout
from deploy.options.subcommand import add_command

if TYPE_CHECKING:
    from deploy.commands.group_admin import GroupAdmin

_DESCRIPTION = """\
Restarts the workers of all groups, one group after another. A group finishes its requests, is removed, and starts
again. New requests go to the other groups. No request is lost. Groups that are drained already stay drained. Workers
that `baton flip` has moved return to their first group before that group restarts.

If the cluster has only one generation group, an extra group starts before this group is removed, which needs free
resources. While the only prefill group restarts, generation groups compute the prompts. If the command fails or is
interrupted, the cluster still serves, and the command prints how to continue."""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the `reload` command to the command line."""
    text = "restart the workers of all groups, one after the other, without losing a request"
    parser = add_command(commands, run, "reload", text, _DESCRIPTION)
    add_cluster(parser)
    parser.add_argument(
        "--group", action="append", default=[], metavar="GROUP", help="group to restart; may be repeated (default: all)"
    )
    parser.add_argument(
        "--model",
        default="",
        metavar="FOLDER",
        help="folder of a model with other weights, but the same configuration and tokenizer (default: the served one)",
    )
    add_timeout(parser, "timeout in seconds for a group to finish its requests, and to start (default: none)")
    add_key_option(parser)


def run(args: argparse.Namespace) -> int:
    """Run `baton reload`. Return the exit status 0 when all groups have new workers."""
    from deploy.commands.group_admin import group_admin  # imports grpc

    with group_admin(args) as admin:  # first checks that the cluster runs
        rollout = _Rollout(admin, args.model if args.target else _resolved(args.model))
        names = args.group or rollout.names()
        for number, name in enumerate(names):
            try:
                rollout.reload(name)
            except (BatonError, KeyboardInterrupt):
                for line in rollout.advice(_options(args), names[number:]):
                    print(line, file=sys.stderr)
                raise
            print(f"{name} has new workers: {number + 1} of {len(names)} groups")
    return 0


class _Rollout:
    """Rolling replacement of the workers of a running cluster, one group at a time."""

    def __init__(self, admin: "GroupAdmin", model: str) -> None:
        self._admin = admin
        self._model = model
        self._stand_in = ""
        """Name of the extra group that was started to serve while the only generation group is replaced. Empty if none
        was started."""
        self._is_withdrawn = False
        """True once the drain of the group that is being reloaded has begun. The drain ends the group's workers."""

    def names(self) -> list[str]:
        """Return the names of the groups to reload. Groups that are drained or that use a worker of another group are
        not included."""
        return [group.name for group in self._admin.state().groups if not group.is_drained and not group.lender]

    def reload(self, name: str) -> None:
        """Replace the workers of a group, and return when it serves again. Workers that it has lent to groups of the
        other role are returned to it first. Raises BatonError if the replacement fails. The group may then still be
        drained, or may have no workers."""
        self._is_withdrawn = False
        for group in self._admin.state().groups:
            if group.name == name and group.lender:
                raise UnavailableError(f"{name} has a worker of {group.lender}: reload that, and the worker goes back")
            if group.lender == name:
                self._admin.flip(group.name, undo=True)
        if self._is_last_to_generate(name):
            self._stand_in = self._start_stand_in(name)
        self._is_withdrawn = True
        self._admin.drain(name, returns=True)
        self._admin.restore(name, model=self._model)
        if self._stand_in:
            self._admin.drain(self._stand_in)
            self._stand_in = ""

    def advice(self, options: str, left: Sequence[str]) -> list[str]:
        """Return lines of text that explain how to continue after a failed reload. `options` are the options of the
        command. `left` are the names of the groups that were not reloaded; the first of them is the group that
        failed."""
        name, groups = left[0], "".join(f" --group {each}" for each in left)
        lines = [f"the cluster still serves; to continue: `baton reload{options}{groups}`"]
        if self._is_withdrawn:
            lines.append(f"to leave {name} as it is: `baton drain {name} --undo`")
        if self._stand_in:
            lines.append(f"{self._stand_in} stands in for {name}: `baton drain {self._stand_in}` once that is back")
        return lines

    def _is_last_to_generate(self, name: str) -> bool:
        able = [group.name for group in self._admin.state().groups if group.role == "generate" and group.is_ready]
        return able == [name]

    def _start_stand_in(self, name: str) -> str:
        try:
            return self._admin.start_like(name)
        except BatonError as error:
            raise UnavailableError(
                f"{name} is the only group that generates, and none can stand in for it ({error}): make room for one"
            ) from error


def _resolved(model: str) -> str:
    if not model:
        return ""
    from rich.console import Console

    from baton.settings.paths import cache_folder
    from deploy.machine.model_folder import resolve_folder

    return str(resolve_folder(model, cache_folder(), Console(stderr=True)).absolute())


def _options(args: argparse.Namespace) -> str:
    """Return the command's options as the user wrote them, without the groups."""
    options = f" {args.name}" if args.name != "baton" else ""
    for option in ("target", "model", "timeout", "api_key_env"):
        value = getattr(args, option)
        options += f" --{option.replace('_', '-')} {value}" if value else ""
    return options
