"""Command lines of `baton serve`, `baton status` and `baton stop`. Also contains the implementation of `baton stop`."""

import argparse
import contextlib
import os
import signal
import sys
import threading
import time

from deploy.commands.admin_channel import add_key_option, given_key
from deploy.commands.inspection import add_config_options

_STOP_S = 90.0
_POLL_S = 0.1
_STATUS = """Prints the health, the queue, the groups and the slots of a running cluster. The exit status is 1 if the
cluster does not serve or does not answer."""
_STOP = """Ends a cluster and all its processes. If `baton serve` was killed, ends the processes that it has left. The
exit status is 1 if `baton serve` does not end within 90 seconds."""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the `serve`, `status` and `stop` commands to the command line."""
    serve = commands.add_parser(
        "serve",
        help="start a cluster on Ray and serve clients over gRPC and HTTP until Ctrl-C",
        description="Starts Ray on this machine, or joins a running Ray (--address). Then starts the prefill groups, "
        "the generation groups, the orchestrator and an HTTP gateway, and prints the addresses for clients. Ctrl-C "
        "ends everything that the command has started. Workers run on CPUs, unless the settings prefill.device and "
        "generate.device select GPUs.",
    )
    serve.add_argument(
        "--address",
        default="",
        help="address HOST:PORT of a running Ray (default: start a Ray on this machine). Its nodes must declare the "
        "resources baton_prefill and baton_generate: 1 for each worker of the role. Workers listen on the addresses "
        "of their nodes",
    )
    add_config_options(serve)
    serve.set_defaults(run=run_serve)
    for name, run, text, description in (
        ("status", run_status, "show the health, groups, queue and slots of a running cluster", _STATUS),
        ("stop", run_stop, "end a cluster, even if its `baton serve` was killed", _STOP),
    ):
        parser = commands.add_parser(name, help=text, description=description)
        parser.add_argument("name", nargs="?", default="baton", help="name of the cluster (default: baton)")
        parser.set_defaults(run=run)
        if run is run_status:
            add_key_option(parser)
        else:
            parser.add_argument(
                "--address",
                metavar="HOST:PORT",
                help="address of the Ray that the cluster runs on; needed if the machine of `baton serve` is lost",
            )


def run_serve(args: argparse.Namespace) -> int:
    """Run `baton serve`; return the exit status."""
    # Imported here and below, so that --help is answered without pydantic, grpc or ray.
    from deploy.commands.serve import serve

    return serve(args)


def run_status(args: argparse.Namespace) -> int:
    """Run `baton status`; return 0 if the cluster serves, else 1."""
    from deploy.commands.status import show_status

    return show_status(args.name, given_key(args))


def run_stop(args: argparse.Namespace) -> int:
    """Run `baton stop`: end the cluster and all its processes. Return 0, or 1 if the cluster's launcher does not
    end."""
    from deploy.commands.record import kill_ray, load_record

    if args.address is not None:
        from deploy.commands.ray_access import require_reachable

        require_reachable(args.address)
        found = _end_on(args.address, args.name)
        print(f"cluster {args.name}: {'stopped' if found else 'not running'} on Ray at {args.address}")
        return 0
    record = load_record(args.name)
    if record is None:
        print(f"cluster {args.name}: not running")
        return 0
    if record.launcher_lives:
        with contextlib.suppress(ProcessLookupError):
            os.kill(record.launcher_pid, signal.SIGTERM)
        deadline, pause = time.monotonic() + _STOP_S, threading.Event()
        while record.launcher_lives:
            if time.monotonic() > deadline:
                print(f"cluster {args.name}: launcher {record.launcher_pid} does not end: kill it", file=sys.stderr)
                return 1
            pause.wait(_POLL_S)
        if load_record(args.name) is None:
            print(f"cluster {args.name}: stopped")
            return 0
    if record.ray_folder:
        num_killed = kill_ray(record.ray_folder)
        print(f"cluster {args.name}: its launcher is gone; killed {num_killed} processes that it left")
    else:
        _end_on(record.ray_address, args.name)
        print(f"cluster {args.name}: its launcher is gone; ended what it left on Ray at {record.ray_address}")
    record.remove()
    return 0


def _end_on(address: str, name: str) -> bool:
    """End the cluster of that name on a Ray that keeps running. Return whether the cluster existed. Does nothing if
    that Ray no longer runs."""
    from baton.errors import UnavailableError
    from deploy.commands.ray_access import prepare_to_join

    try:
        prepare_to_join(address)
    except UnavailableError:
        return False
    import ray

    from deploy.ray_cluster.supervisor_state import end_supervisor

    ray.init(address, namespace=name, configure_logging=False, log_to_driver=False)
    try:
        return end_supervisor(name)
    finally:
        ray.shutdown()
