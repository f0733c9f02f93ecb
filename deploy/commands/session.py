"""Runs one prompt on a temporary cluster in one process tree: loads the model, tokenizes the prompt, starts the
workers, streams the answer, and draws the request's timeline.

The answer is written to standard output, and everything else to standard error. Runs on the launcher's asyncio loop.
"""

import argparse
import asyncio
import contextlib
import sys
import uuid
from collections.abc import AsyncIterator

from rich.console import Console
from rich.status import Status

from baton.errors import InvalidArgumentError
from baton.process.clock import Clock, SystemClock
from baton.sampling_params import SamplingParams
from baton.text.tokenizer import Tokenizer
from baton.types import RequestId
from deploy.commands.timeline import draw_timeline
from deploy.config.cluster import ClusterConfig
from deploy.groups.cluster import LocalCluster
from deploy.machine.cluster_plan import ClusterPlan
from deploy.machine.model_folder import resolve_drafts, resolve_folder
from deploy.machine.planners import served_planner
from deploy.machine.resolved_model import ResolvedModel
from deploy.machine.this_machine import prepare_machine
from orchestrator.composition import build_orchestrator
from orchestrator.requests.record import Finished, Started
from orchestrator.requests.request import Request
from orchestrator.scheduler import RequestScheduler


def run_session(config: ClusterConfig, prompt: str, params: SamplingParams, args: argparse.Namespace) -> int:
    """Answer one prompt according to the options of `baton local`; return the exit status."""
    console = Console(stderr=True)
    model = ResolvedModel(resolve_folder(config.model.name, config.model.cache, console))
    plan = resolve_drafts(ClusterPlan(config, model), console)
    machine = prepare_machine(console)
    tokenizer = Tokenizer.load(model.folder)
    ids = tokenizer.encode_chat([{"role": "user", "content": prompt}]) if args.chat else tokenizer.encode(prompt)
    spec = Request(RequestId(uuid.uuid4().hex), tuple(ids), params)
    _check_length(spec, plan.max_tokens)
    clock, status = SystemClock(), console.status("starting")
    cluster = LocalCluster(plan, clock, status.update, kernels=machine.kernels)
    finished, token_ns = asyncio.run(_answer(cluster, spec, clock, status))
    if not args.no_timeline:
        draw_timeline(finished.timings, finished.usage, finished.reasons, token_ns, console)
    if finished.error is not None:
        raise finished.error
    return 0


async def _answer(cluster: LocalCluster, spec: Request, clock: Clock, status: Status) -> tuple[Finished, list[int]]:
    """Stream the answer to standard output. Return the stream's last event, and the time at which each token was made
    (unix ns)."""
    token_ns: list[int] = []
    finished: Finished | None = None
    with status:
        async with cluster, running_scheduler(cluster, clock) as scheduler:
            status.update(f"prefill of {len(spec.prompt_ids)} tokens")
            async with contextlib.aclosing(scheduler.generate(spec)) as events:
                async for event in events:
                    if isinstance(event, Started):
                        continue
                    status.stop()
                    if isinstance(event, Finished):
                        finished = event
                        continue
                    sys.stdout.write(event.text)
                    sys.stdout.flush()
                    if event.token is not None:
                        token_ns.append(event.unix_ns)
    print(flush=True)  # ends the line before the timeline on standard error
    assert finished is not None, "a stream ended without its last event"
    return finished, token_ns


def _check_length(spec: Request, max_tokens: int) -> None:
    total = len(spec.prompt_ids) + spec.params.max_tokens
    if total > max_tokens:
        raise InvalidArgumentError(
            f"prompt of {len(spec.prompt_ids)} tokens and --max-tokens {spec.params.max_tokens} exceed the "
            f"{max_tokens} tokens that a slot holds and the model takes: shorten one of them"
        )


@contextlib.asynccontextmanager
async def running_scheduler(cluster: LocalCluster, clock: Clock) -> AsyncIterator[RequestScheduler]:
    """Context manager. Run an orchestrator for a running cluster, and yield its scheduler. On exit, the orchestrator
    and all its requests are ended."""
    config = cluster.plan.config.orchestrator_config(cluster.plan.model.folder)
    planner = await asyncio.to_thread(served_planner, cluster.plan)
    orchestrator = build_orchestrator(cluster.members, planner, clock, secret=cluster.secret, config=config)
    orchestrator.start()
    try:
        yield orchestrator.scheduler
    finally:
        await orchestrator.close()
