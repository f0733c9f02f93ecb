"""`baton simulate`: predicts the time to first token for any numbers of ranks, links or models.

It needs no cluster, no model and no torch, because it uses the cost model (`planning`). docs/kv_runahead.md explains
the cost model, and benchmarks.simulate_paper compares it with the KV-Runahead paper.
"""

import argparse
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from baton.errors import InvalidArgumentError
from baton.planning.cost_model import CostModel, LinkModel
from baton.planning.hardware import derive
from baton_lab.study.known_hardware import HARDWARE, hardware_of, hardware_title
from baton_lab.study.known_models import SHAPES, shape_from, shape_of
from baton_lab.study.protocols import PROTOCOLS
from deploy.options import numbers as option_values
from deploy.options.subcommand import add_command

if TYPE_CHECKING:
    from rich.table import Table

    from baton_lab.study.comparison import Comparison

DEFAULT_MODEL = "llama-3.1-8b"
DEFAULT_HARDWARE = "h100-flash"
MAX_TOKENS = 2**21
MAX_RANKS = 64
_ENOUGH_MARGIN = 0.03

_DESCRIPTION = """\
Predicts the time to first token (TTFT) of one prompt on an idle prefill group, for several prompt lengths and numbers
of ranks. Compares Baton's chain of ranks with other methods that divide a prompt among ranks. All times come from a
cost model: they are predictions, not measurements. The output has a table for each number of ranks, with these columns:

  1 rank     one rank, which computes the whole prompt
  KVR-E      KV-Runahead: a chain of ranks, each with a chunk of the prompt; here all chunks have the same length
  KVR-S      the same, with the chunk lengths that a search finds
  KVR-P      the same, with chunk lengths that are interpolated between searched ones
  TSP        sequence parallelism with an all-gather in each layer, with dense or with causal attention kernels
  zigzag     ring attention with balanced chunks and causal kernels
  bound      lower bound: equal work on all ranks, no communication. A chain can be slightly faster, because it
             shortens the last layer
  TTFT*      lower bound of the KV-Runahead paper for n ranks: TTFT(1) / 2 (1/n + 1/n^2), with dense attention"""

_EXAMPLES = """\
examples:
  baton simulate                                              Llama-3.1-8B on H100s, 2 to 8 ranks
  baton simulate --link-gb-s 1 --ranks 4 --contexts 8k        slow links: most tokens go to the last rank
  baton simulate --model llama-7b --hardware a100-eager --protocol paper --ranks 4,8 --plot paper.png
  baton simulate --model smollm2-135m --hardware here --ranks 2 --contexts 512,2k,6000"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the `simulate` command to the command line."""
    text = "predict the time to first token for other ranks, links, models and hardware"
    parser = add_command(commands, run, "simulate", text, _DESCRIPTION, examples=_EXAMPLES)
    text = "numbers of ranks of the prefill group (default: %(default)s)"
    parser.add_argument("--ranks", default="2,4,8", metavar="N,N,...", help=text)
    text = "numbers of uncached prompt tokens; k multiplies by 1024 (default: %(default)s)"
    parser.add_argument("--contexts", default="1k,2k,4k,8k,16k,32k", metavar="N,N,...", help=text)
    text = "number of cached prompt tokens before the uncached ones (default: 0)"
    parser.add_argument("--cached", default="0", metavar="N", help=text)
    protocols = f"protocol of the chain: {', '.join(PROTOCOLS)} (default: baton, the implemented one)"
    parser.add_argument("--protocol", default="baton", metavar="NAME", help=protocols)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="PNG file for a plot; needs the extra 'lab'")
    group = parser.add_argument_group("model and machine")
    group.add_argument("--model", metavar="NAME", help=f"model: {', '.join(SHAPES)} (default: {DEFAULT_MODEL})")
    group.add_argument(
        "--shape",
        metavar="FIELD=N,...",
        help="shape of a model, instead of --model. Required: num_layers, hidden, num_heads, num_kv_heads, head_dim,"
        " ffn, vocab. Optional: gated=0 (feed-forward network without a gate), dtype_bytes (default: 2)",
    )
    text = f"hardware: {', '.join(HARDWARE)}, or here for this machine (default: {DEFAULT_HARDWARE})"
    group.add_argument("--hardware", metavar="NAME", help=text)
    for name, text in (
        ("--linear-tflop-s", "rate of matrix products in TFLOP/s (default: the hardware's)"),
        ("--attention-tflop-s", "rate of attention in TFLOP/s (default: the hardware's)"),
        ("--link-gb-s", "bandwidth from rank to rank in 1e9 bytes per second (default: the hardware's)"),
        ("--link-us", "latency of a message from rank to rank in microseconds (default: the hardware's)"),
        ("--push-gb-s", "bandwidth from rank to generation group in 1e9 bytes per second (default: not counted)"),
    ):
        group.add_argument(name, metavar="X", help=text)


def run(args: argparse.Namespace) -> int:
    """Run `baton simulate`; return the exit status."""
    # Imported here and below, so that --help and invalid options are answered without numpy.
    from rich.console import Console

    from baton_lab.study.comparison import compare

    if args.protocol not in PROTOCOLS:
        raise InvalidArgumentError(f"--protocol = {args.protocol!r} is unknown: use one of {', '.join(PROTOCOLS)}")
    ranks = option_values.counts("--ranks", args.ranks, MAX_RANKS)
    contexts = option_values.counts("--contexts", args.contexts, MAX_TOKENS)
    cached = option_values.count("--cached", args.cached, MAX_TOKENS, least=0)
    name, cost = machine(args)
    protocol = PROTOCOLS[args.protocol]
    by_ranks = {n: [compare(tokens, n, cost, protocol, cached=cached) for tokens in contexts] for n in ranks}
    console = Console()
    title = f"{name}, protocol {args.protocol}" + (f", {cached} tokens cached" if cached else "")
    for num_ranks, rows in by_ranks.items():
        console.print(times_table(f"{title}: {num_ranks} ranks", rows))
    console.print(ranks_table(by_ranks))
    if args.plot is not None:
        from baton_lab.forecasts.simulate_plot import draw

        draw(title, by_ranks, args.plot)
    return 0


def machine(args: argparse.Namespace) -> tuple[str, CostModel]:
    """Return the cost model for the model and hardware that the options name, and a title that describes them."""
    if args.shape is not None and args.model is not None:
        raise InvalidArgumentError("--shape and --model say the same: leave one out")
    name, cost = _derived(args)
    link, push = cost.link, cost.push
    if args.link_gb_s is not None:
        link = dataclasses.replace(link, bandwidth=option_values.positive("--link-gb-s", args.link_gb_s) * 1e9)
    if args.link_us is not None:
        latency_us = option_values.positive("--link-us", args.link_us, or_zero=True)
        link = dataclasses.replace(link, latency_s=latency_us / 1e6)
    if args.push_gb_s is not None:
        push = LinkModel(link.latency_s, option_values.positive("--push-gb-s", args.push_gb_s) * 1e9)
    text = f"{name}, links {link.bandwidth / 1e9:g} GB/s and {link.latency_s * 1e6:.3g} us"
    return text, dataclasses.replace(cost, link=link, push=push)


def times_table(title: str, rows: "list[Comparison]") -> "Table":
    """Return a table of the predicted times, with one line per context length. There is one column for each scheme and
    each lower bound. The fastest scheme of each line is highlighted; a lower bound never is."""
    from deploy.options.screen import number_table

    headings = "tokens|1 rank|KVR-E|KVR-S|KVR-P|TSP\ndense|TSP\ncausal|zigzag|bound|TTFT*"
    table = number_table(f"{title}; seconds", headings.split("|"))
    for row in rows:
        times = (row.single, row.kvr_e, row.kvr_s, row.kvr_p, row.tsp_dense, row.tsp_causal, row.zigzag_ring)
        shown = [f"[bold green]{_seconds(each)}[/]" if each <= min(times) else _seconds(each) for each in times]
        table.add_row(str(row.num_tokens), *shown, _seconds(row.bound), _seconds(row.paper_bound))
    return table


def ranks_table(by_ranks: "dict[int, list[Comparison]]") -> "Table":
    """Return a table of the predicted times of KVR-S, by number of ranks. In KVR-S, ranks prefill consecutive chunks of
    the prompt, and a search finds the best chunk lengths. The table also shows the smallest number of ranks whose time
    exceeds the shortest time by at most the fraction `_ENOUGH_MARGIN`. For the last number of ranks, it shows the
    percentage of the prompt that each rank computes."""
    from baton_lab.study.comparison import enough_ranks
    from deploy.options.screen import number_table

    headings = ["tokens", "1 rank", *(f"{n} ranks" for n in by_ranks), "enough", "KVR-S takes, % of the tokens"]
    title = f"KVR-S by ranks; enough: the fewest within {_ENOUGH_MARGIN:.0%} of the least; seconds"
    table = number_table(title, headings)
    for rows in zip(*by_ranks.values(), strict=True):
        times = [rows[0].single, *(row.kvr_s for row in rows)]
        enough = enough_ranks(list(rows), _ENOUGH_MARGIN)
        table.add_row(str(rows[0].num_tokens), *map(_seconds, times), str(enough), _shares(rows[-1]))
    return table


def _shares(row: "Comparison") -> str:
    """Return each rank's percentage of the prompt, in rank order."""
    shares = [100 * chunk / row.num_tokens for chunk in row.chunks]
    return " ".join(f"{share:.0f}" if share >= 1 else "<1" for share in shares)


def _derived(args: argparse.Namespace) -> tuple[str, CostModel]:
    name, model = args.hardware or DEFAULT_HARDWARE, args.model or DEFAULT_MODEL
    given = option_values.assignments("--shape", args.shape) if args.shape else {}
    shape = shape_from(given, "--shape") if given else shape_of(model)
    hardware = hardware_of(name, shape.dtype_bytes)
    if args.linear_tflop_s is not None:
        rate = option_values.positive("--linear-tflop-s", args.linear_tflop_s) * 1e12
        hardware = dataclasses.replace(hardware, linear_flops=rate)
    if args.attention_tflop_s is not None:
        rate = option_values.positive("--attention-tflop-s", args.attention_tflop_s) * 1e12
        hardware = dataclasses.replace(hardware, pair_flops=rate, scores_per_s=float("inf"))
    title = hardware_title(name, shape.dtype_bytes)
    return f"{'a model' if args.shape else model} on {title}", derive(shape, hardware)


def _seconds(value: float) -> str:
    """Format seconds with four digits, and at least four decimals below 1."""
    return f"{value:.4f}" if value < 1 else f"{value:.4g}"
