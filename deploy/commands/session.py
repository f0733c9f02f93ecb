"""One prompt through a relay of its own: load the model, tokenize, start the workers, stream, draw the timeline.

The answer goes to standard output, everything else to standard error. Runs on the launcher's loop.
"""

import argparse
import asyncio
import contextlib
import sys
import uuid

from rich.console import Console

from baton.clock import SystemClock
from baton.errors import InvalidArgumentError
from baton.ids import RequestId
from baton.sampling_params import SamplingParams
from deploy.commands.local_relay import running_controller
from deploy.commands.timeline import draw_timeline
from deploy.config.local import LocalConfig
from deploy.groups.cluster import LocalCluster
from deploy.machine.limits import tokens_of_slot
from deploy.machine.model_folder import prepare_kernels, resolve_folder
from orchestrator.controller import GenerateSpec
from orchestrator.requests.record import Finished, Started
from text.tokenizer import Tokenizer


def run_session(args: argparse.Namespace, prompt: str, params: SamplingParams) -> int:
    """Answer one prompt with the options of `baton local`; return the exit status."""
    console = Console(stderr=True)
    folder = resolve_folder(args.model, args.cache, console)
    kernels = prepare_kernels(console)
    config = LocalConfig(
        model_folder=folder,
        num_ranks=0 if args.colocated else args.ranks,
        dtype=args.dtype,
        quantization=args.quantization,
        generate_threads=args.threads,
        kernels=kernels,
    )
    tokenizer = Tokenizer.load(folder)
    ids = tokenizer.encode_chat([{"role": "user", "content": prompt}]) if args.chat else tokenizer.encode(prompt)
    spec = GenerateSpec(RequestId(uuid.uuid4().hex), tuple(ids), params)
    _check_length(spec, tokens_of_slot(folder, config.max_slot_tokens))
    finished, token_ns = asyncio.run(_answer(config, spec, console))
    if not args.no_timeline:
        draw_timeline(finished.timings, finished.usage, finished.reasons, token_ns, console)
    if finished.error is not None:
        raise finished.error
    return 0


async def _answer(config: LocalConfig, spec: GenerateSpec, console: Console) -> tuple[Finished, list[int]]:
    """Stream the answer to standard output. Return the stream's end, and when each token was made (unix ns)."""
    clock = SystemClock()
    token_ns: list[int] = []
    finished: Finished | None = None
    with console.status("starting") as status:
        async with (
            LocalCluster(config, clock, status.update) as cluster,
            running_controller(cluster, clock) as controller,
        ):
            status.update(f"prefill of {len(spec.prompt_ids)} tokens")
            async with contextlib.aclosing(controller.generate(spec)) as events:
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


def _check_length(spec: GenerateSpec, max_tokens: int) -> None:
    total = len(spec.prompt_ids) + spec.params.max_tokens
    if total > max_tokens:
        raise InvalidArgumentError(
            f"prompt of {len(spec.prompt_ids)} tokens and --max-tokens {spec.params.max_tokens} exceed the "
            f"{max_tokens} tokens that a slot holds and the model takes: shorten one of them"
        )
