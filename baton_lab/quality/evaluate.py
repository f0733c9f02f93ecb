"""`baton evaluate`: measures the quality that residency policies lose, and the memory and bandwidth that they save.

It needs no cluster. One process runs natural text through each policy, in the same way as a generation group would
(`baton_lab.quality.reading`).
"""

import argparse
import dataclasses
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from baton.errors import InvalidArgumentError
from baton_lab.comparators.traits import POLICIES
from baton_lab.plot import require_plots
from baton_lab.quality.evaluation import Cell, Setting, Size
from deploy.config.environment import DEFAULT_MODEL
from deploy.options import numbers as option_values
from deploy.options.subcommand import add_command
from deploy.tuning.selection.wanted import add_model
from generate_workers.residency.traits import POOLED, PolicyTraits, policy_named

if TYPE_CHECKING:
    from rich.table import Table

MAX_TOKENS = 2**24
MAX_ROWS = 2**10

_DESCRIPTION = """\
Runs natural text through residency policies and compares each with full attention (device) on the same tokens. A row
is one passage: its context is prefilled once, with full attention, and pushed to each policy. The text after it is fed
token by token, all rows in one batch, and each step predicts the next token of the text.

  perplexity    of the true tokens; cost: its relative increase over full attention's, with the standard error
  same choice   fraction of the steps whose likeliest token equals full attention's
  keys          mean fraction of a row's keys attended to, in selective layers
  KV read       bytes of KV that attention reads, relative to full attention
  home          bytes of KV stored between steps, relative to full attention
  link, device  counted, as with a device: KV that crosses to it, and its memory, the data for choosing keys included;
                here all of it is the CPU's memory, unless --device emulated has memory of its own
  mass          weight of true attention on the keys attended to (--mass)
  needles       facts stated early in the context, queried after --steps tokens of other text (--needles)

Policies that select keys use the file of `baton prepare` for the model. --budget and --alpha vary the number of keys;
NAME:BUDGET in --policies varies one policy's only, to compare policies at equal bytes. With --pool, infinigen also runs
with that fraction of each row's tokens kept, once per eviction policy."""

_EXAMPLES = """\
examples:
  baton evaluate --text emma.txt persuasion.txt
  baton evaluate --text emma.txt --budget 0.02,0.05,0.1,0.2 --mass 32 --plot quality.png
  baton evaluate --text emma.txt --policies device,infinigen --pool 0.8
  baton evaluate --text emma.txt --policies device,infinigen,window:0.23,h2o:0.23
  baton evaluate --text emma.txt --policies device,int4,infinigen,infinigen_int4
  baton evaluate --text emma.txt --policies device,infinigen --device emulated --link 4GBps
  baton evaluate ./Llama-3.1-8B --text book.txt.gz --context 4k,16k --policies device,infinigen,h2o,int4 --needles"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the `evaluate` command to the command line."""
    text = "measure the quality of residency policies, compared with full attention"
    parser = add_command(commands, run, "evaluate", text, _DESCRIPTION, examples=_EXAMPLES)
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL, metavar="MODEL", help="name, folder, or GGUF file")
    parser.add_argument(
        "--text", required=True, nargs="+", type=Path, metavar="FILE", help="natural text, UTF-8, plain or gzipped"
    )
    policies = "device,oracle,window,infinigen"
    parser.add_argument("--policies", default=policies, metavar="NAME[:BUDGET],...", help="(default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw a PNG; needs the extra 'lab'")
    read = parser.add_argument_group("what is read")
    read.add_argument(
        "--context", default="4096", metavar="N,N,...", help="numbers of context tokens (default: %(default)s)"
    )
    read.add_argument("--rows", default="6", metavar="N", help="number of passages in a batch (default: %(default)s)")
    read.add_argument("--steps", default="512", metavar="N", help="number of tokens to predict (default: %(default)s)")
    read.add_argument(
        "--mass", default="0", metavar="N", help="measure true attention on the selected keys at every Nth step; slow"
    )
    read.add_argument("--needles", action="store_true", help="also test recall of facts, in a second pass")
    keys = parser.add_argument_group("how keys are chosen")
    keys.add_argument("--budget", metavar="X,X,...", help="exact fraction of a sequence's keys that is attended to")
    keys.add_argument("--alpha", metavar="X,X,...", help="maximum distance of a key's score from the best score")
    keys.add_argument("--pool", metavar="X,X,...", help=f"fraction of a sequence's tokens that is kept ({POOLED})")
    keys.add_argument(
        "--selection",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="file that `baton prepare` wrote; several are compared",
    )
    _add_device(parser)
    add_model(parser)


def _add_device(parser: argparse.ArgumentParser) -> None:
    """Add the options for the device that policies compute on."""
    group = parser.add_argument_group("device")
    where = "where policies compute: cpu, or emulated, with memory of its own (docs/devices.md)"
    group.add_argument("--device", default="cpu", choices=("cpu", "emulated"), help=f"{where} (default: %(default)s)")
    group.add_argument("--link", metavar="RATE", help="rate of an emulated device's link, like 4GBps")


def run(args: argparse.Namespace) -> int:
    """Run `baton evaluate`; return the exit status."""
    size, settings, rate = find_size(args), find_settings(args), find_rate(args)
    # Imported late because it imports torch: --help and invalid options are answered at once.
    from rich.console import Console

    from baton_lab.quality.plots import draw
    from baton_lab.quality.reading import evaluate

    if args.plot is not None:
        require_plots(args.plot)  # fails before minutes of reading
    evaluation = evaluate(args, size, settings, Console(stderr=True, highlight=False), rate)
    if args.json:
        print(json.dumps(dataclasses.asdict(evaluation)))
    else:
        console = Console(highlight=False)
        console.print(f"[bold]{evaluation.title}[/]", soft_wrap=True)
        console.print(quality_table(evaluation.cells, evaluation.num_rows), "")
        console.print(bytes_table(evaluation.cells))
    if args.plot is not None:
        draw(evaluation, args.plot)
    return 0


def find_size(args: argparse.Namespace) -> Size:
    """Return the amount of text to read, according to the options. Raises InvalidArgumentError for an option that is
    out of range."""
    option_values.check_threads(args.threads)
    return Size(
        contexts=option_values.counts("--context", args.context, MAX_TOKENS),
        num_rows=option_values.count("--rows", args.rows, MAX_ROWS),
        num_steps=option_values.count("--steps", args.steps, MAX_TOKENS),
        mass_every=option_values.count("--mass", args.mass, MAX_TOKENS, least=0),
        has_needles=args.needles,
    )


def find_rate(args: argparse.Namespace) -> float:
    """Return the bandwidth of the emulated device's link in bytes per second. Raises InvalidArgumentError for options
    that are invalid or have no effect."""
    if args.device == "emulated" and args.mass != "0":
        raise InvalidArgumentError("--mass needs the keys in host memory: leave --device emulated out")
    if args.link is None:
        return float("inf")
    if args.device != "emulated":
        raise InvalidArgumentError("--link has no effect without --device emulated: leave it out")
    return option_values.rate("--link", args.link)


def find_settings(args: argparse.Namespace) -> list[Setting]:
    """Return the settings (residency policies with parameters) to compare, according to the options.

    A policy that is named with a budget (`NAME:BUDGET`) gets one setting with this budget. Any other policy gets one
    setting for each value of `--budget` if it has the parameter `budget`, and one for each value of `--alpha` if it has
    the parameter `alpha`. If no value applies, it gets one setting with its default parameters. For a policy that needs
    a basis, these settings are repeated for each file of `--selection`. For a policy with a pool, each setting is used
    without a pool, and also with each combination of a size of `--pool` and an eviction policy. Raises
    InvalidArgumentError for invalid options, and ConfigError for an unknown policy.
    """
    from generate_workers.config import EvictionName  # imports pydantic

    named = [name.strip().partition(":") for name in args.policies.split(",")]
    policies = [(policy_named(name, POLICIES), has_own, own) for name, has_own, own in dict.fromkeys(named)]
    sizes: list[dict[str, float]] = []
    if args.budget is not None:
        sizes += [{"budget": budget} for budget in option_values.ascending("--budget", args.budget, option_values.part)]
    if args.alpha is not None:
        sizes += [{"alpha": alpha} for alpha in option_values.ascending("--alpha", args.alpha, option_values.positive)]
    files: list[Path | None] = list(args.selection or [None])
    pools = option_values.ascending("--pool", args.pool, option_values.part) if args.pool is not None else ()
    if pools and not any(policy.has_pool for policy, _, _ in policies):
        raise InvalidArgumentError(f"--pool has no effect without {POOLED}: name it in --policies")
    settings = []
    for policy, has_own, own in policies:
        meant = [size for size in sizes if set(size) <= set(policy.sizes)] or [{}]
        if has_own:
            meant = [{"budget": _own_budget(policy, own)}]
        # for policies without a basis, several files would give the same reading
        used = files if policy.needs_basis else files[:1] if policy.chooses_keys else [None]
        for path, size in itertools.product(used, meant):
            whole = Setting(policy.name, size.get("budget"), size.get("alpha"), path)
            kept = itertools.product(pools, get_args(EvictionName)) if policy.has_pool else ()
            settings += [whole, *(dataclasses.replace(whole, pool=pool, eviction=how) for pool, how in kept)]
    return list(dict.fromkeys(settings))


def _own_budget(policy: PolicyTraits, text: str) -> float:
    """Parse the budget that follows a policy's name."""
    if "budget" not in policy.sizes:
        raise InvalidArgumentError(f"--policies {policy.name}:{text}: {policy.name} has no budget, name it alone")
    return option_values.part("--policies", text.strip())


def quality_table(cells: Sequence[Cell], num_rows: int) -> "Table":
    """Return a table of output quality, with one line per cell: a setting at one context length. `num_rows`: number of
    needles (facts hidden in passages) per cell."""
    from deploy.options.screen import number_table

    headings = ("context", "policy", "perplexity", "cost, %", "same choice", "mass", "needles")
    table = number_table("quality", headings, words="policy")
    for cell in cells:
        error = "" if cell.cost_error is None else f" +- {100 * cell.cost_error:.1f}"
        table.add_row(
            str(cell.context),
            cell.setting,
            f"{cell.perplexity:.2f}",
            f"{100 * cell.cost:+.1f}{error}",
            f"{cell.same_choice:.3f}",
            "-" if cell.mass is None else f"{cell.mass:.3f}",
            "-" if cell.num_found is None else f"{cell.num_found} of {num_rows}",
        )
    return table


def bytes_table(cells: Sequence[Cell]) -> "Table":
    """Return a table of the KV bytes that are read and stored, with one line per cell: a setting at one context
    length."""
    from deploy.options.screen import number_table

    headings = ("context", "policy", "keys", "KV read", "link", "home", "device", "step, ms")
    table = number_table("what is read and held, % of full attention's", headings, words="policy")
    for cell in cells:
        parts = (cell.picked_share, cell.kv_share, cell.link_share, cell.home_share, cell.device_share)
        shown = ("-" if part is None else f"{100 * part:.1f}" for part in parts)
        table.add_row(str(cell.context), cell.setting, *shown, f"{cell.step_ms:.0f}")
    return table
