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
Compares residency policies with full attention (the policy device) on the same text: the loss of quality, and the KV
that is read and stored. The text is divided into --rows passages. The context of a passage is prefilled once, with full
attention, and its KV is given to each policy. The policy then reads the text after the context token by token, with all
passages in one batch. Each step predicts the next token of the text. The output has these columns:

  perplexity    perplexity of the text after the context
  cost          relative increase of perplexity, compared with full attention, with its standard error
  same choice   fraction of steps whose most likely token is the same as with full attention
  mass          fraction of the weight of full attention that is on the keys attended to (with --mass)
  needles       number of recalled facts, which are queried after --steps tokens of other text (with --needles)
  keys          mean fraction of a sequence's keys attended to, in layers that select keys
  KV read       bytes of KV that attention reads, relative to full attention
  link          bytes of KV copied between host and device memory, relative to the KV bytes that full attention reads
  home          bytes of KV stored between steps, relative to full attention
  device        bytes of device memory, including data for selecting keys, relative to the KV that full attention stores
  step          median duration of a step

With --device cpu, host and device share one memory, and nothing is copied. The columns link and device then show the
bytes that a device with separate memory would need.

Policies that select keys use the file that `baton prepare` wrote for the model. --budget and --alpha change the number
of keys of all these policies. NAME:BUDGET in --policies changes it for one policy, for example to compare policies at
equal bytes. With --pool, the policy infinigen also runs with a limit on the tokens that it keeps, once for each of its
eviction policies."""

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
    text = "model: name, Hugging Face folder, or GGUF file (default: %(default)s)"
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL, metavar="MODEL", help=text)
    text = "files with natural text in UTF-8, plain or gzipped"
    parser.add_argument("--text", required=True, nargs="+", type=Path, metavar="FILE", help=text)
    policies = "device,oracle,window,infinigen"
    text = f"policies to compare: {', '.join(POLICIES)} (default: %(default)s)"
    parser.add_argument("--policies", default=policies, metavar="NAME[:BUDGET],...", help=text)
    parser.add_argument("--json", action="store_true", help="print the results as one JSON object")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="PNG file for a plot; needs the extra 'lab'")
    read = parser.add_argument_group("text")
    text = "numbers of context tokens of a passage (default: %(default)s)"
    read.add_argument("--context", default="4096", metavar="N,N,...", help=text)
    text = "number of passages, which form one batch (default: %(default)s)"
    read.add_argument("--rows", default="6", metavar="N", help=text)
    text = "number of tokens to predict in each passage (default: %(default)s)"
    read.add_argument("--steps", default="512", metavar="N", help=text)
    text = "number of steps between two measurements of mass, which are slow; 0: none (default: 0)"
    read.add_argument("--mass", default="0", metavar="N", help=text)
    text = "also test the recall of facts that are inserted into the contexts"
    read.add_argument("--needles", action="store_true", help=text)
    keys = parser.add_argument_group("selection of keys")
    text = "fractions of a sequence's keys to attend to, regardless of their scores"
    keys.add_argument("--budget", metavar="X,X,...", help=text)
    text = "maximum distances of a selected key's score from the best score"
    keys.add_argument("--alpha", metavar="X,X,...", help=text)
    keys.add_argument(
        "--pool", metavar="X,X,...", help=f"fractions of a sequence's tokens to keep ({POOLED}; default: all)"
    )
    text = "files that `baton prepare` wrote, to compare (default: the file for the model)"
    keys.add_argument("--selection", nargs="+", type=Path, metavar="FILE", help=text)
    _add_device(parser)
    add_model(parser)


def _add_device(parser: argparse.ArgumentParser) -> None:
    """Add the options for the device that policies compute on."""
    group = parser.add_argument_group("device")
    where = "device on which policies compute: cpu, or emulated, with separate memory (docs/devices.md)"
    group.add_argument("--device", default="cpu", choices=("cpu", "emulated"), help=f"{where} (default: %(default)s)")
    text = "bandwidth of the link to the emulated device, for example 4GBps (default: no limit)"
    group.add_argument("--link", metavar="RATE", help=text)


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
