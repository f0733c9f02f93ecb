"""Benchmark of long contexts on a device with little memory. The engine's device has only `--device-gib` GiB (default:
1) for weights and KV; the limit is also enforced on a CPU.

A whole local cluster runs: an orchestrator, a prefill rank and a generation engine. Prompts are passages of a novel
that start at different positions. The policies `host` and `infinigen` keep KV in host memory. The policy `device` is
not measured, because its KV does not fit (see `benchmarks.residency`).

Each prompt is first sent alone for one output token, so that its KV is in the prefix cache. Then all prompts are sent
at once. Output rows: milliseconds per token while all streams run, for `infinigen` (or the policies in `--policies`)
compared with `host`; and the engine's memory at the end of this period compared with its start. Keys are selected as in
`benchmarks.sparse`.

With `--device emulated --link 4GBps` the engine's device has separate memory, and all policies use the same link
(docs/devices.md). Without it, on a CPU, no data crosses a link: `host` copies each layer's KV and reads the copy, and
`infinigen` reads keys in place and copies nothing. The ratio on a CPU therefore does not apply to a device.

With `--bars`, the benchmark fails unless each measured policy is at least 1.5 times as fast as `host`, and the engine's
memory at the end of the period is at most 1.05 times its memory at the start. A refused request ends the benchmark.
"""

import argparse
import asyncio
import contextlib
import os
import sys
import tempfile
import uuid
from dataclasses import dataclass
from pathlib import Path
from time import time_ns

from baton.modeling.checkpoints.weights import load_decoder
from baton.modeling.sparse.selection_file import save_prepared
from baton.process.clock import SystemClock
from baton.sampling_params import SamplingParams
from baton.settings.byte_sizes import parse_rate
from baton.types import RequestId, TokenEvent
from benchmarks.sparse import find_source, text_ids
from benchmarks.support.harness import Bars, Pairs, Reporter, case, make_parser, progress, resolve
from benchmarks.support.local_config import local_config
from benchmarks.support.streams import Load, Measured, StreamTimes
from deploy.commands.session import running_scheduler
from deploy.config.cluster import ClusterConfig
from deploy.groups.cluster import LocalCluster
from deploy.machine.cluster_plan import ClusterPlan
from deploy.machine.resolved_model import ResolvedModel
from orchestrator.requests.record import Finished
from orchestrator.requests.request import Request
from orchestrator.scheduler import RequestScheduler

NUM_STREAMS, NUM_TOKENS, OUTPUT_TOKENS = 8, 7500, 96
QUICK_STREAMS, QUICK_TOKENS, QUICK_OUTPUT = 2, 512, 24
SPEED_BAR = 1.5
MEMORY_BAR = 1.05
_TEXT = "emma.txt.gz"
_STRIDE = 1000
"""Distance in tokens between the starts of two consecutive prompts in the novel."""
_PREFIX_SHARE = 0.3
"""Fraction of /dev/shm that is used to cache the prompts' KV."""
_PAGE_MIB = os.sysconf("SC_PAGE_SIZE") / 2**20


@dataclass(frozen=True)
class Ran:
    """Measurements of one policy while all streams run at once."""

    measured: Measured
    early_mib: float
    """Resident memory of the engine's process in MiB, measured when the last stream received its first token."""
    late_mib: float
    """Resident memory of the engine's process in MiB, measured when the first stream received its last token."""


class _Watch:
    """Measures the memory of the engine's process at the start and at the end of the period in which all streams
    run."""

    def __init__(self, pid: int, num_streams: int) -> None:
        self._statm = Path(f"/proc/{pid}/statm")
        self._num_idle = num_streams
        self.early_mib = self.late_mib = 0.0

    def began(self) -> None:
        """Record that a stream has received its first token. When all streams have received theirs, measure the
        engine's memory."""
        self._num_idle -= 1
        if not self._num_idle:
            self.early_mib = self._resident_mib()

    def ended(self) -> None:
        """Record that a stream has received its last token. The first call also measures the engine's memory."""
        self.late_mib = self.late_mib or self._resident_mib()

    def _resident_mib(self) -> float:
        return int(self._statm.read_text().split()[1]) * _PAGE_MIB


async def follow(
    scheduler: RequestScheduler, prompt: tuple[int, ...], max_tokens: int, watch: _Watch | None
) -> StreamTimes:
    """Send a prompt, read its stream to the end, and return the times of its tokens. If `watch` is not None, notify it
    of the first and of the last token. Raises the error that ended the request, if any."""
    asked_ns, first_ns, token_ns = time_ns(), 0, []
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    spec = Request(RequestId(uuid.uuid4().hex), prompt, params)
    async with contextlib.aclosing(scheduler.generate(spec)) as events:
        async for event in events:
            if isinstance(event, TokenEvent) and event.token is not None:
                token_ns.append(event.unix_ns)
                if not first_ns:
                    first_ns = time_ns()
                    if watch is not None:
                        watch.began()
            elif isinstance(event, Finished) and event.error is not None:
                raise event.error
    if watch is not None:
        watch.ended()
    return StreamTimes(asked_ns, first_ns, tuple(token_ns))


async def run_policy(config: ClusterConfig, folder: Path, load: Load) -> Ran:
    """Run all prompts one after the other to fill the prefix cache, then all at once. Return the measurements of the
    second run."""
    clock = SystemClock()
    async with (
        LocalCluster(ClusterPlan(config, ResolvedModel(folder)), clock) as cluster,
        running_scheduler(cluster, clock) as scheduler,
    ):
        with progress(f"{config.generate.residency}: prompts", len(load.prompts)) as advance:
            for prompt in load.prompts:
                await follow(scheduler, prompt, 1, None)
                advance()
        watch = _Watch(cluster.engine.handle.pid, len(load.prompts))
        streams = (follow(scheduler, prompt, load.max_tokens, watch) for prompt in load.prompts)
        return Ran(Measured(tuple(await asyncio.gather(*streams))), watch.early_mib, watch.late_mib)


def make_prompts(folder: Path, num_streams: int, num_tokens: int) -> tuple[tuple[int, ...], ...]:
    """Return `num_streams` passages of a novel with `num_tokens` tokens each. The passages overlap, but start at
    different positions."""
    token_ids = text_ids(folder, _TEXT, num_tokens + (num_streams - 1) * _STRIDE)
    return tuple(tuple(token_ids[start : start + num_tokens]) for start in range(0, num_streams * _STRIDE, _STRIDE))


def save_selection(args: argparse.Namespace, folder: Path, path: Path) -> None:
    """Write the file from which the policy `infinigen` reads how to select keys."""
    save_prepared(find_source(load_decoder(folder, dtype=args.dtype), folder, args.selection).load(), path)


async def run(args: argparse.Namespace, selection_file: Path) -> int:
    """Measure the policies. Return 0, or 1 if `--bars` is given and a value misses its limit."""
    folder = resolve(args)
    save_selection(args, folder, selection_file)
    sizes = (QUICK_STREAMS, QUICK_TOKENS, QUICK_OUTPUT) if args.quick else (NUM_STREAMS, NUM_TOKENS, OUTPUT_TOKENS)
    num_streams, num_tokens, max_tokens = sizes
    load = Load(make_prompts(folder, num_streams, num_tokens), max_tokens)
    ran = {}
    for policy in (*args.policies, "host"):
        config = local_config(
            args.dtype,
            num_ranks=1,
            prefix_share=_PREFIX_SHARE,
            num_threads=0,
            residency=policy,
            selection_file=str(selection_file),
            device_memory_bytes=int(args.device_gib * 2**30),
            num_slots=num_streams,
            device=args.device,
            link=args.link,
        )
        ran[policy] = await run_policy(config, folder, load)
    host = ran.pop("host")
    reporter, bars = Reporter("limited", args.json), Bars()
    for policy, sparse in ran.items():
        where = {} if args.device == "cpu" else {"device": args.device}
        name = case(batch=num_streams, context=num_tokens, policy=policy, dtype=args.dtype, **where)
        row = reporter.add(name, "step_ms", "ms", "host", Pairs(*([1e3 / _rate(each)] for each in (sparse, host))))
        reporter.add(name, "rss_mib", "MiB", "early", Pairs([sparse.late_mib], [sparse.early_mib]))
        bars.at_least(f"{policy}: times as fast as host", row.ratio, SPEED_BAR)
        bars.at_most(f"{policy}: memory, over what it was", sparse.late_mib / sparse.early_mib, MEMORY_BAR)
    reporter.close()
    return bars.close() if args.bars else 0


def _rate(ran: Ran) -> float:
    """Return the mean tokens per second of a stream while all streams run."""
    return ran.measured.tokens_s / len(ran.measured.streams)


def main() -> int:
    """Run the benchmark; return the exit status."""
    parser = make_parser(__doc__)
    parser.add_argument(
        "--device-gib", type=float, default=1.0, help="size of the device memory for weights and KV, in GiB"
    )
    parser.add_argument(
        "--device", default="cpu", choices=("cpu", "emulated"), help="device of the engine (default: cpu)"
    )
    parser.add_argument(
        "--link", type=parse_rate, default=0, help="rate of the link to an emulated device, for example 4GBps"
    )
    parser.add_argument(
        "--policies",
        type=lambda text: text.split(","),
        default=["infinigen"],
        help="policies compared with host (default: infinigen)",
    )
    parser.add_argument("--selection", type=Path, default=None, help="file of `baton prepare`; default: the model's")
    parser.add_argument("--bars", action="store_true", help="exit with 1 when a bar is missed")
    with tempfile.TemporaryDirectory(prefix="baton-") as scratch:
        return asyncio.run(run(parser.parse_args(), Path(scratch) / "selection.safetensors"))


if __name__ == "__main__":
    sys.exit(main())
