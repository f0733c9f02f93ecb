"""Benchmark of the prefill of a long prompt: compares Baton with vLLM's CPU build, and with the minimum time that the
processor needs.

Baton uses two ranks with one thread each, the native kernel, and the chunk sizes that a search finds for the prompt
(KVR-S). vLLM uses the same number of threads. It requires `--peer-python PATH`, the Python that
`peers/setup_vllm_cpu.sh` installs, and `--peer-model DIR`; without them the results do not include vLLM. vLLM runs in
one process during the whole benchmark. Baton and vLLM are measured alternately, and each is idle while the other is
measured.

The baseline `bound` is the time for the model's FLOPs, divided evenly among the ranks. It is computed from the rates of
a layer's matrix products and of attention. The two rates are measured one after the other, each on all ranks at the
same time. The time above the bound is reported in three parts: the time in which the last rank waits for earlier ranks'
KV, the time to send commands and to sample, and all other work of the busiest rank (norms, rotations, residuals,
merging partial attention, lower rates, uneven chunks).

If `--bars` is given, the benchmark fails if Baton takes more than 0.8 times as long as vLLM. On a processor with AMX,
which vLLM's matrix products use, the limit is 0.95.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from baton.modeling.kernels.processor import cpu_flags
from baton.planning.chain.partition import as_ranges
from baton.planning.chain.search import search
from baton.planning.cost_model import BATON
from baton.planning.model_shape import ModelShape
from benchmarks.baselines.calibrating import LENGTHS as CALIBRATED
from benchmarks.baselines.calibrating import QUICK_LENGTHS as QUICK_CALIBRATED
from benchmarks.baselines.calibrating import calibrated
from benchmarks.baselines.rank_process import Task
from benchmarks.baselines.ranks import Outcome, Ranks
from benchmarks.support.harness import (
    PAIRS,
    QUICK_PAIRS,
    Bars,
    Pairs,
    Reporter,
    case,
    make_parser,
    peer_folder,
    progress,
    random_prompt,
    resolve,
)
from benchmarks.support.rates import RateProbe, runnable
from deploy.machine.planners import cpu_costs
from deploy.machine.resolved_model import ResolvedModel

TOKENS = 6000
QUICK_TOKENS = 512
VLLM_BAR = 0.95 if "amx_bf16" in cpu_flags() else 0.8
"""Maximum ratio of Baton's time to first token to vLLM's."""
_PROBE_S = 1.0
_PEER_SCRIPT = Path(__file__).parent / "peers" / "vllm_cpu_bench.py"
_PEER_KV_GB = 2


class _Peer:
    """Connection to a vLLM process, which has its own environment and waits for prompts."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        self.version = str(self._answer()["ready"])

    @classmethod
    @contextlib.contextmanager
    def running(cls, python: Path, model: Path, cores: list[int]) -> Iterator["_Peer"]:
        """Context manager. Start vLLM in a separate process, and yield it when it is ready, after about a minute. The
        process is ended on exit."""
        threads = f"VLLM_CPU_OMP_THREADS_BIND={','.join(str(core) for core in cores)}"
        settings = ["env", threads, f"OMP_NUM_THREADS={len(cores)}", f"VLLM_CPU_KVCACHE_SPACE={_PEER_KV_GB}"]
        command = [*settings, str(python), str(_PEER_SCRIPT), str(model), "--serve"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            yield cls(process)
            assert process.stdin is not None
            process.stdin.close()  # this ends the process

    def ttft_s(self, num_tokens: int) -> float:
        """Send a new prompt of `num_tokens` tokens to vLLM. Return its time to first token in seconds."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"tokens": num_tokens}) + "\n")
        self._process.stdin.flush()
        return float(str(self._answer()["ttft_s"]))

    def _answer(self) -> dict[str, object]:
        """Return the next line of the script. Lines that vLLM itself prints are skipped."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return dict(json.loads(line))
        raise RuntimeError(f"the peer ended, with {self._process.wait()}: see its output above")


def bound_s(ranks: Ranks, shape: ModelShape, num_tokens: int) -> tuple[float, str]:
    """Return the minimum time of the prefill in seconds, and a line that shows how it is computed. It is the time for
    the model's FLOPs, divided evenly among the ranks, at the rates of matrix products and attention that this function
    measures."""
    width = len(ranks)
    rates = {
        kind: sum(ranks.rates(RateProbe(kind, _PROBE_S, shape, num_tokens // width), width))
        for kind in ("layer", "attention")
    }
    linear_s = shape.num_layers * shape.linear_flops * num_tokens / rates["layer"]
    attention_s = shape.num_layers * shape.pair_flops * num_tokens**2 / 2 / rates["attention"]
    reached = ", ".join(f"{kind} {rate / width / 1e9:.0f} GFLOP/s" for kind, rate in rates.items())
    text = f"bound: matrices {linear_s:.2f} s, attention {attention_s:.2f} s; a rank, all busy, reaches {reached}"
    return linear_s + attention_s, text


def parts(outcomes: list[Outcome], least_s: float) -> str:
    """Return a line that shows how the prefill time above its lower bound is spent, as median seconds of each part.
    `least_s` is the lower bound in seconds (see `bound_s`)."""

    def median(values: Iterator[float]) -> float:
        return statistics.median(values)

    seconds = median(outcome.seconds for outcome in outcomes)
    busiest = median(max(answer.compute_s for answer in outcome.answers) for outcome in outcomes)
    last = [outcome.answers[-1] for outcome in outcomes]
    waited = median(answer.report.wait_s for answer in last if answer.report is not None)
    own = median(answer.compute_s for answer in last)
    return (
        f"above the bound: {seconds - least_s:.2f} s; last rank computes {own:.2f} s, waits {waited:.2f} s; commands "
        f"and sampling {seconds - own - waited:.2f} s; busiest rank {busiest - least_s:.2f} s above the bound"
    )


def run(args: argparse.Namespace) -> int:
    """Measure Baton, and vLLM if the options for it are given. Return 0, or 1 if `--bars` is given and a value misses
    its limit."""
    folder, cores = resolve(args), sorted(os.sched_getaffinity(0))[: args.ranks]
    num_tokens = args.tokens or (QUICK_TOKENS if args.quick else TOKENS)
    pairs = args.pairs or (QUICK_PAIRS if args.quick else PAIRS)
    kernel = runnable(["native", "sdpa"])[0]
    reporter, bars, console = Reporter("vllm", args.json), Bars(), Console(stderr=True, highlight=False)
    with contextlib.ExitStack() as stack:
        ranks = stack.enter_context(Ranks.running(folder, args.dtype, [(core,) for core in cores]))
        origin = cpu_costs(ResolvedModel(folder), args.dtype, 1)
        costs = calibrated(ranks, origin, kernel, QUICK_CALIBRATED if args.quick else CALIBRATED)
        chunks = as_ranges(search(num_tokens, len(ranks), costs.prefill, BATON), 0)
        least_s, text = bound_s(ranks, origin.shape, num_tokens)
        console.print(f"  {text}", markup=False)
        peer = None
        if args.peer_python is not None:
            peer = stack.enter_context(_Peer.running(args.peer_python, peer_folder(args), cores))
            console.print(f"  peer: vLLM {peer.version}, {len(cores)} threads", markup=False)
        outcomes, theirs = list[Outcome](), list[float]()
        with progress(f"{num_tokens} tokens", pairs + 1) as advance:
            for seed in range(pairs + 1):
                outcomes.append(ranks.run(Task("kvr", random_prompt(num_tokens, seed), chunks, kernel=kernel)))
                if peer is not None:
                    theirs.append(peer.ttft_s(num_tokens))
                advance()
    name = case(tokens=num_tokens, ranks=len(cores), scheme="kvr_s", kernel=kernel)
    ours = [outcome.seconds for outcome in outcomes[1:]]
    if theirs:
        row = reporter.add(name, "ttft_s", "s", "vllm", Pairs(ours, theirs[1:]))
        bars.at_most(f"of vLLM's time, {num_tokens} tokens", 1 / row.ratio, VLLM_BAR)
    reporter.add(name, "ttft_s", "s", "bound", Pairs(ours, [least_s] * len(ours)))
    console.print(f"  {parts(outcomes[1:], least_s)}", markup=False)
    reporter.close()
    return bars.close() if args.bars else 0


def main() -> int:
    """Run the benchmark; return the exit status."""
    parser = make_parser(__doc__)
    parser.add_argument(
        "--tokens", type=int, default=0, help=f"number of tokens of the prompt; 0: {TOKENS}, or {QUICK_TOKENS} quick"
    )
    parser.add_argument(
        "--ranks", type=int, default=2, help="number of ranks of the chain, one core each, and of vLLM's threads"
    )
    parser.add_argument("--peer-python", type=Path, default=None, help="Python of vLLM's environment")
    parser.add_argument("--peer-model", type=Path, default=None, help="Hugging Face folder for vLLM; default: Baton's")
    parser.add_argument("--pairs", type=int, default=0, help=f"rounds; 0: {PAIRS}, or {QUICK_PAIRS} with --quick")
    parser.add_argument("--bars", action="store_true", help="exit with 1 when a bar is missed")
    return run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
