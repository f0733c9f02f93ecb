"""Implements `baton gateway`: serves gRPC clients in a separate process, and forwards their requests to an orchestrator
that runs elsewhere. Any number of gateways can use the same orchestrator."""

import argparse
import logging
from typing import TYPE_CHECKING

from baton.channel_options import DEFAULT_TARGET
from baton.errors import DeadlineExceededError, InvalidArgumentError, UnavailableError
from baton.settings.addresses import join_address
from deploy.commands.admin_channel import given_key
from deploy.front_doors.options import add_front_door, check_front_door, stopped_by_signals
from deploy.options.subcommand import add_command

if TYPE_CHECKING:
    from baton.v1 import orchestrator_pb2 as pb
    from deploy.ray_cluster.finding import OrchestratorFinder
    from orchestrator.api.gateway import GrpcGateway, Metadata

logger = logging.getLogger(__name__)

_ANSWER_S = 10.0
_LOOK_S = 1.0
"""Seconds between two lookups of the orchestrator's address."""
_MOST_PAUSE_S = 5.0
"""Maximum pause in seconds between two lookups of the orchestrator's address while lookups fail."""

_DESCRIPTION = """\
Serves gRPC clients in front of a running cluster. The gateway validates requests, renders chats and tokenizes, and
forwards the requests to the cluster's orchestrator. To clients, a gateway and an orchestrator look the same.

Gateways store no state of streams. If a gateway fails, a client resumes its streams through another gateway. To name
several gateways, a client uses the target ipv4:HOST:PORT,HOST:PORT. If the orchestrator restarts, the gateway connects
to it again. With --address, the gateway also finds an orchestrator that has moved to another node.

After SIGTERM or Ctrl-C, running streams have --grace seconds to end."""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the `gateway` command to the command line."""
    text = "serve gRPC clients in front of an orchestrator that runs elsewhere"
    parser = add_command(commands, run, "gateway", text, _DESCRIPTION)
    printed = "address of the orchestrator, as printed by `baton serve` (default: %(default)s)"
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--orchestrator", default=DEFAULT_TARGET, metavar="HOST:PORT", help=printed)
    text = "address of the Ray that the cluster runs on; replaces --orchestrator. Ray stores the orchestrator's address"
    where.add_argument("--address", metavar="HOST:PORT", help=text)
    text = "name of the cluster, with --address (default: %(default)s)"
    parser.add_argument("--cluster", default="baton", metavar="NAME", help=text)
    add_front_door(parser, port=50052)


def run(args: argparse.Namespace) -> int:
    """Run `baton gateway` until it is interrupted; return the exit status."""
    check_front_door(args)
    if not args.orchestrator.strip():
        raise InvalidArgumentError("--orchestrator is empty: use HOST:PORT, as `baton serve` prints it")
    # Imported here, because they import grpc and tokenizers: --help and mistyped options are answered at once.
    import asyncio

    return asyncio.run(_serve(args))


async def _serve(args: argparse.Namespace) -> int:
    import asyncio
    import contextlib

    from rich.console import Console

    from baton.calls.requests import call_metadata
    from baton.process.clock import SystemClock
    from baton.process.garbage import collect_rarely
    from baton.text.tokenizer import Tokenizer
    from deploy.machine.model_folder import resolve_folder
    from deploy.options.logs import set_up_logs
    from orchestrator.api.gateway import GrpcGateway

    set_up_logs(logging.INFO, args.log_format)
    console = Console(stderr=True, highlight=False)
    stopping = stopped_by_signals()
    caller = call_metadata(given_key(args), None)
    async with contextlib.AsyncExitStack() as stack:
        finder = _finder(args)
        if finder is not None:
            stack.push_async_callback(finder.close)
        upstream = _Upstream(args.orchestrator if finder is None else await finder.find())
        stack.push_async_callback(upstream.close)
        model = await upstream.ask_model(caller)
        named = args.model or model.name
        folder = await asyncio.to_thread(resolve_folder, named, args.cache, console, weights=False)
        allowed = args.control_tokens_in_text
        tokenizer = await asyncio.to_thread(Tokenizer.load, folder, control_tokens_in_text=allowed)
        gateway = await GrpcGateway.start(
            upstream.channel, tokenizer, model, clock=SystemClock(), host=args.host, port=args.port, caller=caller
        )
        following = [] if finder is None else [asyncio.create_task(upstream.follow(finder, gateway))]
        collect_rarely()
        serving = f"serving on {join_address(args.host, gateway.port)}"
        console.print(f"gateway of {model.name} at {upstream.target}: {serving}", soft_wrap=True)
        await stopping.wait()
        for task in following:
            task.cancel()
        await asyncio.gather(*following, return_exceptions=True)
        await gateway.stop(args.grace)
    return 0


def _finder(args: argparse.Namespace) -> "OrchestratorFinder | None":
    """Return the finder of the orchestrator on the Ray that --address names; None without that option."""
    if args.address is None:
        return None
    from deploy.commands.ray_access import prepare_to_join

    prepare_to_join(args.address)
    from deploy.ray_cluster.finding import OrchestratorFinder  # imports ray, which reads what was prepared

    return OrchestratorFinder(args.address, args.cluster)


class _Upstream:
    """gRPC channel to the orchestrator, which is replaced when the orchestrator's address changes. Owned by the
    command."""

    def __init__(self, target: str) -> None:
        from baton.transport.channel import make_channel

        self.target = target
        self.channel = make_channel(target)

    async def ask_model(self, caller: "Metadata") -> "pb.Model":
        """Return the model that the orchestrator serves. `caller` is the metadata of the call. Raises UnavailableError
        if the orchestrator does not answer."""
        from orchestrator.api.gateway import ask_model

        try:
            return await ask_model(self.channel, _ANSWER_S, caller)
        except (UnavailableError, DeadlineExceededError) as error:
            raise UnavailableError(
                f"no orchestrator answers at {self.target}: {error}; check --orchestrator or --address"
            ) from error

    async def follow(self, finder: "OrchestratorFinder", gateway: "GrpcGateway") -> None:
        """Look up the orchestrator's address regularly, and connect the gateway to each new address, until cancelled.
        While Ray does not answer, the gateway continues to use the current address."""
        import asyncio

        from baton.process.backoff import Backoff
        from baton.process.endless import repeat
        from baton.transport.channel import make_channel

        async def look() -> None:
            await asyncio.sleep(_LOOK_S)
            target = await finder.find()
            if target != self.target:
                logger.warning("the orchestrator has moved from %s to %s", self.target, target)
                former, self.channel, self.target = self.channel, make_channel(target), target
                await gateway.move(self.channel)
                await former.close()

        await repeat("the search for the orchestrator", look, Backoff(_LOOK_S, _MOST_PAUSE_S))

    async def close(self) -> None:
        """Close the channel. Calls that are still running are ended. Idempotent."""
        await self.channel.close()
