"""Measures how close Baton gets to the limits of a GPU: its memory, its tensor cores and its link to the host.

The models have real shapes and random weights in bf16 (`benchmarks.device`). The device's rates are measured in the
same run:

    steps     decode steps over paged KV, compared with (bytes read / rate of a copy) (`roofline`), and steps of an
              engine that replays CUDA graphs, compared with those of an engine without graphs (`launched`)
    prefill   one forward pass of a prompt, compared with (operations / rate of a large matrix product) (`product`)
    offload   steps of residencies `host` and `infinigen`, whose KV is in host memory, compared with those of `device`
              and with (bytes over the link / rate of the link) (`link`)
    chain     prefill of a prompt by two processes that share the device, compared with one process (`single`)
    overheads launches, graph replays and pinned memory, compared with an operator of torch (`torch`)
    kernels   attention, products and sampling of one layer, compared with the device's rates and torch's attention.
              Needs a GPU
    served    an engine in this process under closed-loop loads: its steps, times to first token and gaps between
              tokens, compared with the minimum times of their bytes and operations (`floor`), and a profile of the
              loaded engine. `--log FOLDER` writes each step, each compilation and a trace

With `--bars`, the benchmark fails unless steps reach 0.8 of the roofline and a prefill reaches 0.6 of the rate of the
matrix product. On devices other than a GPU, the benchmark is only a smoke test. Steps then need Triton's interpreter:
set TRITON_INTERPRET=1 in the environment.
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from baton.modeling.device.making import make_device
from baton.modeling.device.port import Device
from baton.modeling.forward.decoder import Decoder
from baton.modeling.forward.triton.attention import triton_kernel
from baton.modeling.kernels.triton.launch import is_interpreted
from baton.modeling.kv.buffers import BufferSpan
from baton.types import TokenRange
from benchmarks.device import chain, kernels, loads, offload, overheads, steps
from benchmarks.device.kernels import Measured, Rates
from benchmarks.device.model import ONE_B, SEVEN_B, TINY, Shape, random_model
from benchmarks.device.rates import link_rates, memory_rate, product_rate, times_s
from benchmarks.support.harness import Bars, Pairs, Reporter, case

ROOFLINE_BAR, PRODUCT_BAR = 0.8, 0.6
_GB = 1e9


@dataclass(frozen=True)
class Sizes:
    """Sizes of the models, batches and prompts that the benchmark measures."""

    model: Shape
    chained: Shape
    """Shape of the model that each process of a chain loads."""
    steps: tuple[tuple[int, int], ...]
    """Batches of the decode steps to measure, each as (number of sequences, tokens of each sequence)."""
    offload: tuple[int, int]
    prompt: int
    """Number of prompt tokens in the parts `prefill` and `chain`."""
    copied: int
    """Number of bytes that are copied to measure the rate of the memory, and to measure the rate of the link."""
    product: int
    """Number of rows, and of columns, of the square matrices that measure the rate of matrix products."""
    rounds: int
    settings: tuple[loads.Setting, ...]
    """Engine settings that the benchmark's part `served` measures, each with its loads."""


FULL = Sizes(SEVEN_B, ONE_B, ((16, 4096), (64, 1024)), (16, 4096), 8192, 2 << 30, 8192, 5, loads.FULL)
QUICK = Sizes(TINY, TINY, ((2, 40),), (2, 64), 128, 1 << 20, 128, 1, loads.QUICK)
PINNED_BYTES = 1 << 30


class Benchmark:
    """One run of the benchmark on one device. Each method measures one part."""

    def __init__(
        self, device: Device, sizes: Sizes, reporter: Reporter, bars: Bars | None, log: Path | None = None
    ) -> None:
        """Prepare a run on a device. `bars`: collects the checks of required values; None: no checks. `log`: folder for
        the logs of single steps; None: no logs."""
        self._device, self._sizes, self._reporter, self._bars, self._log = device, sizes, reporter, bars, log
        self._is_gpu = device.torch_device.type == "cuda"
        self._console = Console(stderr=True, highlight=False)

    def steps(self) -> None:
        """Measure decode steps over paged KV, and compare them with the roofline."""
        if not self._is_gpu and not _has_interpreter():
            self._console.print("  steps: skipped, needs a GPU or TRITON_INTERPRET=1", style="dim")
            return
        rate = memory_rate(self._device, self._sizes.copied)
        self._console.print(f"  memory: {rate / _GB:.1f} GB/s, read and written", style="dim")
        most = max(context for _, context in self._sizes.steps) + 512
        decoder = random_model(self._sizes.model, self._device, max_position=most)
        for batch, context in self._sizes.steps:
            times = steps.measure(decoder, self._device, batch, context, self._sizes.rounds)
            name = case(batch=batch, context=context, model=self._sizes.model.name)
            best_ms = min(times.graphs_ms, times.launched_ms, key=statistics.median)
            bound_ms = steps.roofline_ms(times, rate)
            row = self._reporter.add(name, "step_ms", "ms", "roofline", Pairs(best_ms, [bound_ms] * len(best_ms)))
            self._check(f"{name}: part of the roofline", row.ratio, ROOFLINE_BAR)
            self._reporter.add(name, "step_ms", "ms", "launched", Pairs(times.graphs_ms, times.launched_ms))

    @torch.inference_mode()
    def prefill(self) -> None:
        """Measure one forward pass over a whole prompt."""
        num_tokens, shape, rounds = self._sizes.prompt, self._sizes.model, self._sizes.rounds
        rate = product_rate(self._device, self._sizes.product, torch.bfloat16)
        self._console.print(f"  product: {rate / 1e12:.3f} TFLOP/s", style="dim")
        decoder = self._decoder(num_tokens)
        tokens = TokenRange(0, num_tokens)
        buffer = self._device.buffer(decoder.layout, tokens)
        ids = [7 * at % 500 for at in range(num_tokens)]

        def run() -> int:
            hidden_TD = decoder.forward(ids, [BufferSpan(buffer, tokens)])
            return int(decoder.logits(hidden_TD[-1:]).argmax())

        found_ms = [1e3 * s for s in times_s(self._device, run, rounds)]
        bound_ms = 1e3 * shape.prefill_flops(num_tokens) / rate
        name = case(tokens=num_tokens, model=shape.name)
        row = self._reporter.add(name, "prefill_ms", "ms", "product", Pairs(found_ms, [bound_ms] * rounds))
        self._check(f"{name}: part of the product's rate", row.ratio, PRODUCT_BAR)

    def offload(self) -> None:
        """Measure steps with KV in host memory, and compare them with steps with KV in device memory."""
        batch, context = self._sizes.offload
        rounds = self._sizes.rounds
        fetch_rate, store_rate = link_rates(self._device, self._sizes.copied)
        self._console.print(f"  link: in {fetch_rate / _GB:.1f}, out {store_rate / _GB:.1f} GB/s", style="dim")
        plain = self._decoder(context + rounds + 2)
        paged = Decoder(plain.config, plain.weights, device=self._device)  # its rows are stored in pages
        lengths = [context] * batch
        decoders = {"host": plain, "device": paged, "infinigen": paged}
        found = {
            policy: offload.measure(decoder, self._device, policy, lengths, rounds)
            for policy, decoder in decoders.items()
        }
        device_ms, _ = found.pop("device")
        for policy, (step_ms, num_bytes) in found.items():
            name = case(batch=batch, context=context, policy=policy, model=self._sizes.model.name)
            self._reporter.add(name, "step_ms", "ms", "device", Pairs(step_ms, device_ms))
            bound_ms = 1e3 * num_bytes / fetch_rate
            self._reporter.add(name, "step_ms", "ms", "link", Pairs(step_ms, [bound_ms] * rounds))

    def chain(self) -> None:
        """Measure the prefill of a prompt by a chain of two processes that share the device."""
        found = dict[int, list[float]]()
        num_tokens, shape = self._sizes.prompt, self._sizes.chained
        for num_ranks in (1, 2):
            with chain.Chain.running(self._device.name, shape, num_ranks, num_tokens) as ranks:
                ranks.prefill_ms(num_tokens)
                found[num_ranks] = [ranks.prefill_ms(num_tokens) for _ in range(self._sizes.rounds)]
        name = case(tokens=num_tokens, ranks=2, model=shape.name)
        self._reporter.add(name, "ttft_ms", "ms", "single", Pairs(found[2], found[1]))

    def overheads(self) -> None:
        """Measure fixed costs of the device, such as kernel launches."""
        found = overheads.launches_us(self._device)
        for name, us in found.items():
            pairs = Pairs([us], [found["torch operator"]])
            self._reporter.add(case(launch=name), "launch_us", "us", "torch", pairs)
        if self._is_gpu:
            first_ms, again_ms = (overheads.pinning_ms(PINNED_BYTES) for _ in range(2))
            self._reporter.add(case(bytes=PINNED_BYTES), "pinning_ms", "ms", "again", Pairs([first_ms], [again_ms]))

    @torch.inference_mode()
    def kernels(self) -> None:
        """Measure the kernels of one layer: attention, matrix products and sampling."""
        if not self._is_gpu:
            self._console.print("  kernels: skipped, needs a GPU", style="dim")
            return
        shape, rates = self._sizes.model, self._rates()
        self._add(kernels.prefills(shape, self._device, rates))
        self._add(kernels.decodes(shape, self._device, rates))
        self._add(kernels.products(shape, self._device, rates))
        self._add(kernels.draws(self._device, rates))

    def served(self) -> None:
        """Measure an engine under load: its steps, times to first token, and gaps between tokens."""
        shape, most = self._sizes.model, max(each.config.max_slot_tokens for each in self._sizes.settings)
        decoder = random_model(shape, self._device, max_position=most)
        self._add(loads.measure(decoder, shape, self._rates(), self._sizes.settings, self._log))

    def _rates(self) -> Rates:
        sizes = self._sizes
        rates = Rates(
            memory_rate(self._device, sizes.copied), product_rate(self._device, sizes.product, torch.bfloat16)
        )
        self._console.print(f"  {rates.memory / _GB:.1f} GB/s, {rates.product / 1e12:.3f} TFLOP/s", style="dim")
        return rates

    def _add(self, found: Iterable[Measured]) -> None:
        for each in found:
            pairs = Pairs([each.ms], [each.baseline_ms])
            self._reporter.add(case(**each.case), each.metric, "ms", each.baseline, pairs)

    def _check(self, what: str, value: float, bar: float) -> None:
        if self._bars is not None:
            self._bars.at_least(what, value, bar)

    def _decoder(self, max_position: int) -> Decoder:
        kernel = triton_kernel if self._is_gpu else None
        return random_model(self._sizes.model, self._device, max_position=max_position, kernel=kernel)


def _has_interpreter() -> bool:
    from baton.modeling.kernels.triton import append_kernel

    return is_interpreted(append_kernel.append_token)


def main() -> int:
    """Run the benchmark from the command line. Return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--device", default="", choices=("cuda", "cpu", "emulated"), help="default: a GPU if there is one"
    )
    parser.add_argument("--parts", default="steps,prefill,offload,chain", help="parts to measure (default: all)")
    parser.add_argument("--json", action="store_true", help="print one JSON object a row on standard output")
    parser.add_argument("--quick", action="store_true", help="a tiny model and few rounds: a smoke test, not a claim")
    parser.add_argument("--bars", action="store_true", help="exit with 1 when a bar is missed")
    parser.add_argument("--log", type=Path, default=None, help="folder for what `served` logs (default: nowhere)")
    args = parser.parse_args()
    name = args.device or ("cuda" if torch.cuda.is_available() else "emulated")
    if name != "cuda" and not args.quick:
        parser.error(f"device {name}: the models of real shapes are for GPUs: use --quick")
    device, reporter = make_device(name), Reporter("cuda", args.json)
    bars = Bars() if args.bars else None
    benchmark = Benchmark(device, QUICK if args.quick else FULL, reporter, bars, args.log)
    parts: dict[str, Callable[[], None]] = {
        "steps": benchmark.steps,
        "prefill": benchmark.prefill,
        "offload": benchmark.offload,
        "chain": benchmark.chain,
        "overheads": benchmark.overheads,
        "kernels": benchmark.kernels,
        "served": benchmark.served,
    }
    for name in args.parts.split(","):
        parts[name]()
    device.link.rest()
    reporter.close()
    return 0 if bars is None else bars.close()


if __name__ == "__main__":
    sys.exit(main())
