"""`baton plan --speculation`: predicts the speedup by speculative decoding for each batch size and context length, and
the shortest context from which speculative decoding is faster.

The predicted curves correspond to figures 2 to 4 of MagicDec (Sadhukhan et al., 2025), for any model and chip
(`baton_lab.study.speculation`).
"""

import argparse
import copy
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from baton.errors import InvalidArgumentError
from baton.limits import MAX_DRAFTS
from baton.planning.chips import Chip
from baton_lab.forecasts.plan_options import NamedModel, find_chip, find_model
from baton_lab.forecasts.plan_results import RoundCell, SpeculationForecast
from baton_lab.study.roofline import ServedModel, step_time
from baton_lab.study.speculation import Drafting, best_round, pays_from
from deploy.options import numbers as option_values

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

ACCEPTANCE, DRAFT_KEYS = "0.8", "512"
LONGEST = 2**24
"""Maximum context length in tokens for which speculation is predicted."""
_OPTIONS = ("acceptance", "draft_keys", "drafts", "draft_model")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for predictions of speculation to the parser of `baton plan`."""
    group = parser.add_argument_group("speculation")
    text = "predict the speedup of speculative decoding"
    group.add_argument("--speculation", action="store_true", help=text)
    group.add_argument(
        "--acceptance",
        metavar="A,A,...",
        help="probability that a draft is accepted if all drafts before it were accepted: one value for each value of"
        f" --draft-keys (default: {ACCEPTANCE})",
    )
    text = f"numbers of keys that a draft attends to, of which the best is used (default: {DRAFT_KEYS})"
    group.add_argument("--draft-keys", metavar="N,N,...", help=text)
    text = f"numbers of drafts per sequence, of which the best is used (default: 0 to {MAX_DRAFTS})"
    group.add_argument("--drafts", metavar="N,N,...", help=text)
    group.add_argument(
        "--draft-model", metavar="MODEL", help="draft model (default: the served model drafts for itself)"
    )


def check_options(args: argparse.Namespace) -> None:
    """Check the options that belong to --speculation. Raises InvalidArgumentError if one of them was given without
    --speculation."""
    for name in _OPTIONS:
        if getattr(args, name) is not None and not args.speculation:
            option = f"--{name.replace('_', '-')}"
            raise InvalidArgumentError(f"{option} is an option of --speculation: add --speculation, or leave it out")


def make_forecast(
    args: argparse.Namespace, batches: Sequence[int], contexts: Sequence[int], num_chips: int
) -> SpeculationForecast:
    """Compute the forecast of speculation that the options describe, for each pair of a batch size and a context length
    in tokens. With `--hardware here`, blocks while it measures. Raises the errors of `find_model`."""
    acceptances = _acceptances(args)
    numbers = range(MAX_DRAFTS + 1) if args.drafts is None else _numbers(args.drafts)
    named = find_model(args)
    title = f"speculation by {named.name}, {named.formats}"
    draft_model = None
    if args.draft_model is not None:
        draft = _draft_model(args)
        draft_model, title = draft.model, f"{title}, with drafts of {draft.name}"
    hardware, chip = find_chip(args, named.shape)
    drafting = Drafting(acceptances, numbers, draft_model)
    return SpeculationForecast(
        title=f"{title}, on {num_chips} x {hardware}",
        model=named.model,
        draft_model=draft_model,
        chip=chip,
        num_chips=num_chips,
        acceptances=acceptances,
        pays_from={
            batch: pays_from(named.model, chip, drafting, batch=batch, longest=LONGEST, num_chips=num_chips)
            for batch in batches
        },
        cells=tuple(_cell(named.model, chip, num_chips, drafting, (batch, at)) for at in contexts for batch in batches),
    )


def _acceptances(args: argparse.Namespace) -> dict[int, float]:
    """Return the acceptance probabilities by number of draft keys, paired in the order of both options."""
    texts = (DRAFT_KEYS if args.draft_keys is None else args.draft_keys).split(",")
    accepted: str = ACCEPTANCE if args.acceptance is None else args.acceptance
    keys = [option_values.count("--draft-keys", text, LONGEST) for text in texts]
    parts = [option_values.part("--acceptance", text.strip()) for text in accepted.split(",")]
    if len(set(keys)) != len(keys) or len(parts) != len(keys):
        raise InvalidArgumentError(
            f"--acceptance gives {len(parts)} for {len(set(keys))} of --draft-keys: give one for each, and each once"
        )
    return dict(sorted(zip(keys, parts, strict=True)))


def _numbers(text: str) -> Sequence[int]:
    return option_values.counts("--drafts", text, 64, least=0)


def _draft_model(args: argparse.Namespace) -> NamedModel:
    """Return the draft model, in the formats of the served model. Raises the errors of `find_model`."""
    drafting = copy.copy(args)
    drafting.model, drafting.shape, drafting.params, drafting.kv_per_token = args.draft_model, None, None, None
    try:
        return find_model(drafting)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"--draft-model: {error}") from error


def _cell(model: ServedModel, chip: Chip, num_chips: int, drafting: Drafting, size: tuple[int, int]) -> RoundCell:
    batch, context = size
    best = best_round(model, chip, drafting, batch=batch, context=context, num_chips=num_chips)
    plain = step_time(model, chip, batch=batch, context=context, num_chips=num_chips)
    num_bytes = model.all_weight_bytes + batch * model.kv_bytes(context)
    if drafting.model is not None:
        num_bytes += drafting.model.all_weight_bytes + batch * drafting.model.kv_bytes(min(best.draft_keys, context))
    return RoundCell(
        batch=batch,
        context=context,
        fits=num_bytes <= chip.memory_bytes * num_chips,
        kv_share=plain.attention_s / plain.total_s,
        num_drafts=best.num_drafts,
        draft_keys=best.draft_keys,
        num_tokens=best.num_tokens,
        plain_s=best.plain_s,
        draft_s=best.draft_s,
        verify_s=best.verify_s,
        draft_ratio=best.draft_s / best.plain_s,
        verify_ratio=best.verify_s / best.plain_s,
        speedup=best.speedup,
        tokens_s=best.speedup * batch / best.plain_s,
    )


def show(forecast: SpeculationForecast, console: "Console") -> None:
    """Print the tables of the forecast."""
    accepted = ", ".join(f"{part:g} with {keys} keys" for keys, part in forecast.acceptances.items())
    console.print(f"[bold]{forecast.title}[/]", soft_wrap=True)
    console.print(f"drafts accepted: {accepted}", f"each chip {forecast.chip}", "", sep="\n", soft_wrap=True)
    speedups = cells_table(forecast, "speedup / drafts", lambda cell: f"{cell.speedup:.2f}/{cell.num_drafts}")
    lengths = ["never" if length is None else str(length) for length in forecast.pays_from.values()]
    speedups.add_row("pays from", *lengths)
    console.print(speedups, "")
    tables: list[tuple[str, Callable[[RoundCell], str]]] = [
        ("draft step / plain step", lambda cell: f"{cell.draft_ratio:.2f}"),
        ("step that verifies / plain step", lambda cell: f"{cell.verify_ratio:.2f}"),
        ("KV's part of a plain step", lambda cell: f"{cell.kv_share:.0%}"),
    ]
    if len(forecast.acceptances) > 1:
        tables.append(("draft keys", lambda cell: str(cell.draft_keys)))
    for title, text in tables:
        console.print(cells_table(forecast, title, text), "")
    console.print("(in brackets: does not fit)  an upper bound: starting steps takes no time", style="dim")


def cells_table(forecast: SpeculationForecast, title: str, text: Callable[[RoundCell], str]) -> "Table":
    """Return a table with one line per context length and one column per batch size. `text` formats a prediction as the
    text of its cell."""
    from deploy.options.screen import number_table

    table = number_table(title, ("context", *map(str, forecast.pays_from)))
    for context in dict.fromkeys(cell.context for cell in forecast.cells):
        cells = [cell for cell in forecast.cells if cell.context == context]
        shown = [text(cell) if cell.fits else f"[dim]({text(cell)})[/]" for cell in cells]
        table.add_row(str(context), *shown)
    return table
