"""`baton drain`: keeps new work from a group of a running cluster, and waits until it has nothing left to do."""

import argparse
from typing import TYPE_CHECKING

from baton.errors import InvalidArgumentError, UnavailableError

if TYPE_CHECKING:
    from baton.results import GroupState
    from baton.v1.admin_pb2_grpc import AdminStub

_ANSWER_S = 10.0

_DESCRIPTION = """\
Keeps new work from a prefill or generation group, and waits until what it has is done: streams that run there go on to
their ends, requests that come meanwhile go to other groups, or wait. The workers stay up, idle, and no restart of them
or of the orchestrator gives the group work again: --undo does. `baton status` names the groups.

Without a group left to generate, the cluster's health is NOT_SERVING, and requests fail after half a minute; without
one left to prefill, generation groups prefill by themselves."""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the `drain` command."""
    parser = commands.add_parser(
        "drain",
        help="keep new work from a group, and wait until it has nothing left to do",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("group", help="its name, like generate-0")
    parser.add_argument("name", nargs="?", default="baton", help="the cluster's name (default: baton)")
    parser.add_argument("--target", metavar="HOST:PORT", help="a cluster that was brought up on another machine")
    parser.add_argument("--undo", action="store_true", help="let the group have work again")
    parser.add_argument(
        "--timeout",
        type=float,
        metavar="SECONDS",
        help="wait no longer than this (default: until it is done); the group stays drained, the exit status is 1",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns the exit status: 0 once the group is drained, or has work again."""
    if args.timeout is not None and not 0 < args.timeout < float("inf"):
        raise InvalidArgumentError(f"--timeout {args.timeout:g} is out of range: use a time above 0 seconds")
    # Imported here: --help and mistyped options are answered without grpc.
    import grpc

    from baton.status import translate_rpc_errors
    from baton.v1 import admin_pb2
    from baton.v1.admin_pb2_grpc import AdminStub
    from deploy.cluster_record import serving_endpoint

    with grpc.insecure_channel(args.target or serving_endpoint(args.name)) as channel:
        stub = AdminStub(channel)
        if args.undo:
            with translate_rpc_errors():
                stub.Undrain(admin_pb2.UndrainRequest(group=args.group), timeout=_ANSWER_S)
            print(f"{args.group} may get work again")
            return 0
        return _drain(stub, args)


def _drain(stub: "AdminStub", args: argparse.Namespace) -> int:
    """Drains, shows how far that is, and says how it ended."""
    from rich.console import Console

    from baton.errors import DeadlineExceededError
    from baton.proto_types import group_state_from_proto
    from baton.status import translate_rpc_errors
    from baton.v1 import admin_pb2

    state: GroupState | None = None
    try:
        with Console(stderr=True).status(f"draining {args.group}") as status, translate_rpc_errors():
            for message in stub.Drain(admin_pb2.DrainRequest(group=args.group), timeout=args.timeout):
                state = group_state_from_proto(message)
                status.update(f"draining {args.group}: {left_of(state)}")
    except DeadlineExceededError as error:
        left = "" if state is None else f", with {left_of(state)}"
        raise UnavailableError(
            f"{args.group} is not done after {args.timeout:g} s{left}: it stays drained; wait on, or --undo"
        ) from error
    except KeyboardInterrupt:
        print(f"{args.group} stays drained, though it is not done: `baton drain {args.group} --undo` undoes that")
        raise
    if state is not None and not state.is_drained:
        raise UnavailableError(f"{args.group} was let have work again meanwhile: it is not drained")
    print(f"{args.group} is drained: it has nothing left to do")
    return 0


def left_of(state: "GroupState") -> str:
    """What a group has left to do, for people."""
    requests = f"{state.num_requests} request{'' if state.num_requests == 1 else 's'}"
    if state.role != "generate":
        return requests
    return f"{requests}, {state.num_slots - state.num_free} of {state.num_slots} slots"
