"""`baton prepare`: fits the key selection of the residency policies `infinigen` and `infinigen_int4` to a model. These
policies estimate the scores of keys from a few columns of each key. A sequence then attends to the keys with the best
scores.

The command needs no cluster. One process runs the model over a text (`deploy.tuning.selection.fitting`).
docs/infinigen.md describes the fitted parameters.
"""

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING

from baton.errors import InvalidArgumentError
from deploy.options import numbers as option_values
from deploy.options.subcommand import add_command
from deploy.tuning.selection.wanted import Wanted, add_model
from generate_workers.residency.traits import POLICIES

if TYPE_CHECKING:
    from rich.table import Table

    from deploy.tuning.selection.fitting import Outcome

KINDS = ("columns", "columns_q", "skew", "skew_q", "centred")
DEFAULT_MOST_SHARE = "0.2"
MAX_TOKENS = 2**24
MAX_ROWS = 2**10

_CHOOSING = ", ".join(f"`{name}`" for name, traits in POLICIES.items() if traits.chooses_keys)

_DESCRIPTION = f"""\
Prepares a model for the residency policies {_CHOOSING}. With these policies, a generation step
estimates the attention score of every key, and attends only to the keys with the best scores. The command finds two
things and writes them to a file, which is valid for this model, dtype and model.weights:

  basis       projection of queries and keys to a few columns, from which scores are estimated
  selection   limits on selected keys: distance from the best score (alpha), and fraction of all keys (most-share)

The text is divided into --rows passages, which are used as follows:

  first passage    bases of all --kinds and --ratios are fitted to it
  second passage   bases are compared by the attention weight of the keys that they select
  other passages   the model reads --steps tokens after --context tokens, with all keys and with each tried selection

For each ratio, the best basis is kept. The cost of a selection is the relative increase of perplexity, compared with
all keys. Of the selections whose cost plus one standard error is at most --cost, the command takes the one that reads
the fewest bytes. With --alpha, the command does not search: it takes the basis whose selection has the lowest cost.

Use a text that is similar to the requests. About 100,000 characters are enough for the defaults. To measure the result
on another text, use `baton evaluate`."""

_COSTS = ("0.02", "0.015")
"""Default values of the allowed relative increase of perplexity, indexed by the lookahead in layers (0 or 1)."""

_EXAMPLES = """\
examples:
  baton prepare smollm2-135m --text persuasion.txt.gz
  baton prepare ./Llama-3.1-8B --text book.txt --cost 0.01 --context 8k --rows 5
  baton prepare smollm2-135m --text persuasion.txt.gz --ratios 0.3 --alpha 5 --most-share 0.1   (by hand)"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the `prepare` command to the command line."""
    text = "prepare a model for residency policies that attend to selected keys"
    parser = add_command(commands, run, "prepare", text, _DESCRIPTION, examples=_EXAMPLES)
    parser.add_argument("model", metavar="MODEL", help="model: name, Hugging Face folder, or GGUF file")
    text = "file with natural text in UTF-8, plain or gzipped"
    parser.add_argument("--text", required=True, type=Path, metavar="FILE", help=text)
    text = "file to write (default: the file that workers read for this model)"
    parser.add_argument("--output", type=Path, metavar="FILE", help=text)
    parser.add_argument(
        "--cost",
        metavar="X",
        help=f"maximum relative increase of perplexity (default: {_COSTS[0]}; with --lookahead 1: {_COSTS[1]}, because"
        " predicted queries increase it more on other texts)",
    )
    parser.add_argument(
        "--lookahead",
        type=int,
        choices=(0, 1),
        default=0,
        help="number of layers by which keys are selected early. 0: by the layer's own queries. 1: by queries predicted"
        " in the previous layer, for devices that must fetch keys from host memory (default: 0)",
    )
    bases = parser.add_argument_group("bases to try")
    text = f"kinds of bases: {', '.join(KINDS)} (default: all)"
    bases.add_argument("--kinds", default=",".join(KINDS), metavar="NAME,...", help=text)
    text = "fractions of a key's columns that a basis keeps (default: %(default)s)"
    bases.add_argument("--ratios", default="0.2,0.3", metavar="X,...", help=text)
    text = (
        "length of the longest request for which bases must be valid, in tokens (default: the model's context length)"
    )
    bases.add_argument("--reach", metavar="N", help=text)
    _add_selection(parser)
    read = parser.add_argument_group("text")
    text = "number of context tokens of a passage (default: %(default)s)"
    read.add_argument("--context", default="4096", metavar="N", help=text)
    read.add_argument("--rows", default="7", metavar="N", help="number of passages, at least 3 (default: %(default)s)")
    text = "number of tokens to predict in each passage (default: %(default)s)"
    read.add_argument("--steps", default="128", metavar="N", help=text)
    add_model(parser)


def _add_selection(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("selection of keys")
    text = "maximum distance of a selected key's score from the best score; inf: any (default: found by a search)"
    group.add_argument("--alpha", metavar="X", help=text)
    text = f"maximum fraction of keys that are selected by score, with --alpha (default: {DEFAULT_MOST_SHARE})"
    group.add_argument("--most-share", metavar="X", help=text)
    for name, default, text in (
        ("--first", 4, "number of first tokens of a sequence whose keys are always selected"),
        ("--last", 16, "number of latest tokens of a sequence whose keys are always selected"),
        ("--free-keys", 256, "number of keys that may be selected by score, even if most-share allows fewer"),
    ):
        group.add_argument(name, type=int, default=default, metavar="N", help=f"{text} (default: {default})")


def run(args: argparse.Namespace) -> int:
    """Run `baton prepare`; return the exit status."""
    wanted = find_wanted(args)
    # Imported here, because it imports torch: --help and mistyped options are answered at once.
    from rich.console import Console

    from deploy.tuning.selection.fitting import prepare

    outcome = prepare(args, wanted, Console(stderr=True, highlight=False))
    console = Console(highlight=False)
    console.print(f"[bold]{outcome.title}[/]", soft_wrap=True)
    console.print(bases_table(outcome), "")
    console.print(selections_table(outcome), "")
    console.print(f"written to {outcome.path}", soft_wrap=True)
    return 0


def find_wanted(args: argparse.Namespace) -> Wanted:
    """Check the command-line options, and return their values. Raises InvalidArgumentError for an option that is out of
    range."""
    option_values.check_threads(args.threads)
    if args.output is not None and args.output.is_dir():
        raise InvalidArgumentError(f"--output {args.output} is a folder: name a file")
    kinds = tuple(dict.fromkeys(name.strip() for name in args.kinds.split(",")))
    for kind in kinds:
        if kind not in KINDS:
            raise InvalidArgumentError(f"--kinds: {kind!r} is unknown: use some of {', '.join(KINDS)}")
    num_rows = option_values.count("--rows", args.rows, MAX_ROWS)
    if num_rows < 3:
        raise InvalidArgumentError(f"--rows {num_rows} leaves nothing to judge by: use at least 3")
    if args.first < 0:
        raise InvalidArgumentError(f"--first {args.first} is out of range: use 0 or more")
    if args.last < 1:
        raise InvalidArgumentError(f"--last {args.last} leaves out the token itself: use 1 or more")
    if args.free_keys < 1:
        raise InvalidArgumentError(f"--free-keys {args.free_keys} leaves no key to choose: use 1 or more")
    return Wanted(
        kinds=kinds,
        ratios=option_values.ascending("--ratios", args.ratios, option_values.part),
        reach=0 if args.reach is None else option_values.count("--reach", args.reach, MAX_TOKENS),
        lookahead=args.lookahead,
        context=option_values.count("--context", args.context, MAX_TOKENS),
        num_rows=num_rows,
        num_steps=option_values.count("--steps", args.steps, MAX_TOKENS),
        most_cost=option_values.positive("--cost", args.cost or _COSTS[args.lookahead]),
        by_hand=_by_hand(args),
        num_first=args.first,
        num_last=args.last,
        free_keys=args.free_keys,
    )


def _by_hand(args: argparse.Namespace) -> tuple[float, float] | None:
    if args.alpha is None:
        if args.most_share is not None:
            raise InvalidArgumentError("--most-share bounds what --alpha chooses: give both, or neither for a search")
        return None
    alpha = math.inf if args.alpha == "inf" else option_values.positive("--alpha", args.alpha)
    return alpha, option_values.part("--most-share", args.most_share or DEFAULT_MOST_SHARE)


def bases_table(outcome: "Outcome") -> "Table":
    """Return a table of the compared bases (projections of queries and keys to a few columns, from which scores are
    estimated). It shows the fraction of the softmax weight on the keys that are selected with each basis."""
    from deploy.options.screen import number_table

    title = f"attention captured by {outcome.judged_share:.1%} of the keys"
    table = number_table(title, ("basis", "columns", "own queries", "predicted"), words="basis")
    table.add_row("true scores", "all", f"{outcome.best_mass:.4f}", "")
    for judged in outcome.judged:
        name, columns = judged.basis.kind.value, str(judged.basis.num_columns)
        mark = "  best" if judged.is_best else ""
        table.add_row(name, columns, f"{judged.own_mass:.4f}", f"{judged.early_mass:.4f}{mark}")
    return table


def selections_table(outcome: "Outcome") -> "Table":
    """Return a table of the selections within the allowed cost, with the bytes that each reads. The first line is the
    selection that was written to the file."""
    from deploy.options.screen import number_table

    title = f"selections; perplexity of full attention: {outcome.full_perplexity:.2f}"
    headings = ("basis", "columns", "alpha", "most", "keys", "KV read", "perplexity")
    table = number_table(title, headings, words="basis")
    for found in outcome.found:
        selection = found.selection
        error = "" if math.isnan(found.cost_error) else f" +- {found.cost_error:.2%}"
        table.add_row(
            found.basis.kind.value,
            str(found.basis.num_columns),
            f"{selection.alpha:g}",
            f"{selection.most_share:.0%}",
            f"{found.picked_share:.1%}",
            f"{found.read_share:.1%}",
            f"{found.cost:+.2%}{error}",
        )
    return table
