"""`baton plan --explain`: compares disaggregated prefill with the same workers doing both prefill and generation, and
shows when each is faster.

The times are predicted with the same formulas that a cluster's scheduler uses to place requests
(`baton.planning.planner`, through `baton_lab.study.break_even`). For a named kind of hardware, its rates come from
`baton.planning.hardware`. With `--hardware here`, the predictions come from the planner that `baton serve` would create
on this machine.
"""

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton.errors import InvalidArgumentError
from baton.planning.hardware import Hardware
from baton_lab.forecasts.plan_options import find_model
from baton_lab.study.known_hardware import HARDWARE, HERE, basis, hardware_of
from deploy.options import numbers as option_values

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from baton.planning.planner import ChainPlanner
    from baton_lab.study.break_even import Demand, Pools, Side, Span

DEFAULT_HARDWARE = "h100-flash"
MAX_TOKENS = 2**20
MAX_WORKERS = 4096
_DEFAULTS = {"prompt": "4k", "output": "256", "rate": "1", "ranks": "2", "groups": "1", "engines": "1", "slots": "64"}
_LONGEST = 8
"""Longest prompt that is compared, as a multiple of the length given by --prompt."""
_EXPLAINED = {
    "only apart": "only apart (together is full)",
    "only together": "only together (apart is full)",
    "neither": "neither (both are full)",
}
"""Texts that are shown instead of three values of `Span.better`. They name the kind of prefill that is full, that is,
cannot sustain the rate: disaggregated ("apart"), colocated ("together"), or both."""


@dataclass(frozen=True)
class Explanation:
    """Results that `baton plan --explain` prints. "Apart" means disaggregated: prefill groups prefill. "Together" means
    colocated: the generation engines also prefill."""

    title: str
    demand: "Demand"
    pools: "Pools"
    num_together: float
    """Number of engines if all workers, including prefill ranks, become engines. It can be a fraction, because a rank
    may be slower than an engine."""
    prompt_kv_bytes: float
    """Number of bytes of a prompt's KV. Disaggregated prefill must transfer them."""
    apart: "Side | None"
    """Prediction with disaggregated prefill; None if the workers cannot sustain the demand."""
    together: "Side | None"
    """Prediction with prefill by the generation engines; None if the workers cannot sustain the demand."""
    capacities: tuple[float, float]
    """Highest sustainable rates in requests per second, as (with disaggregated prefill, with colocated prefill)."""
    by_prompt: dict[str, tuple["Span", ...]]
    """Ranges of prompt lengths in tokens, each with the better kind of prefill: disaggregated ("apart") or colocated
    ("together"). The key "first token" compares times to the first token, and the key "whole answer" compares times to
    the last token."""
    by_rate: dict[str, tuple["Span", ...]]
    """Ranges of rates in requests per second, each with the better kind of prefill: disaggregated ("apart") or
    colocated ("together"). The key "first token" compares times to the first token, and the key "whole answer" compares
    times to the last token."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of --explain to the parser of `baton plan`."""
    group = parser.add_argument_group("break-even of disaggregation")
    group.add_argument(
        "--explain",
        action="store_true",
        help="compare disaggregated with colocated prefill, and print the break-even points; --hardware is then one of"
        f" {', '.join(HARDWARE)}, or here (default: {DEFAULT_HARDWARE})",
    )
    for name, metavar, text in (
        ("prompt", "N", "number of tokens of a prompt"),
        ("output", "N", "number of tokens of an answer"),
        ("rate", "X", "number of requests per second of the whole cluster"),
        ("ranks", "N", "number of ranks of a prefill group"),
        ("groups", "N", "number of prefill groups"),
        ("engines", "N", "number of generation engines"),
        ("slots", "N", "maximum number of requests that an engine holds at a time"),
    ):
        group.add_argument(f"--{name}", metavar=metavar, help=f"{text} (default: {_DEFAULTS[name]})")
    text = "bandwidth of each link in 1e9 bytes per second (default: the hardware's)"
    group.add_argument("--link-gb-s", metavar="X", help=text)


def check_options(args: argparse.Namespace) -> None:
    """Check the options that belong to --explain. Raises InvalidArgumentError if one was given without --explain, or if
    --explain was given with an option that excludes it."""
    for name in (*_DEFAULTS, "link_gb_s"):
        if getattr(args, name) is not None and not args.explain:
            option = f"--{name.replace('_', '-')}"
            raise InvalidArgumentError(f"{option} is an option of --explain: add --explain, or leave it out")
    if not args.explain:
        return
    for option, given in (("--speculation", args.speculation), ("--plot", args.plot), ("--kv", args.kv)):
        if given:
            raise InvalidArgumentError(f"{option} is not supported with --explain: leave out one of them")
    if args.chips != "1":
        raise InvalidArgumentError("--chips: every worker of a break-even is one device: use --ranks and --engines")


def make_explanation(args: argparse.Namespace) -> Explanation:
    """Compute the comparison that the options describe. Blocks while it searches partitions of the prompt. Raises the
    errors of `find_model`, and InvalidArgumentError for a number that is out of range."""
    from baton_lab.study.break_even import BreakEven, Demand

    demand = Demand(
        prompt_tokens=_count(args, "prompt", MAX_TOKENS),
        output_tokens=_count(args, "output", MAX_TOKENS),
        rate=option_values.positive("--rate", _given(args, "rate")),
    )
    pools = _pools(args)
    title, planner = _here(args, pools) if _is_here(args) else _named(args, demand, pools)
    if demand.prompt_tokens > planner.max_tokens:
        raise InvalidArgumentError(f"--prompt: a slot here holds {planner.max_tokens} tokens: use fewer")
    even = BreakEven(planner, pools)
    apart, together = even.sides(demand)
    return Explanation(
        title=title,
        demand=demand,
        pools=pools,
        num_together=even.num_together,
        prompt_kv_bytes=demand.prompt_tokens * planner.cost.num_layers * planner.cost.kv_bytes,
        apart=apart,
        together=together,
        capacities=even.capacities(demand),
        by_prompt=_by_key(even.by_prompt, demand),
        by_rate=_by_key(even.by_rate, demand),
    )


def show(found: Explanation, console: "Console") -> None:
    """Print the predictions for disaggregated and colocated prefill, and the ranges of prompt lengths and request rates
    in which each of them is better."""
    demand, pools = found.demand, found.pools
    console.print(f"[bold]{found.title}[/]", soft_wrap=True)
    console.print(
        f"{demand.rate:g} requests/s of {demand.prompt_tokens} tokens, {demand.output_tokens} tokens of answer;"
        f" a prompt's KV: {found.prompt_kv_bytes / 1e6:.4g} MB",
        f"apart: {pools.num_groups} x {pools.num_ranks} prefill ranks, {pools.num_engines} x generation;"
        f" together: the same workers, {found.num_together:g} x both",
        "",
        sep="\n",
        soft_wrap=True,
    )
    console.print(_sides_table(found), "")
    for title, unit, spans in (
        ("better side by tokens of prompt", "", found.by_prompt),
        ("better side by requests/s", ".3g", found.by_rate),
    ):
        console.print(f"[bold]{title}[/]")
        for key, each in spans.items():
            console.print(f"  {key}: {describe(each, unit)}", soft_wrap=True)
    console.print(
        "(time to wait for other requests is not included; a side is full when one of its pools is)", style="dim"
    )


def describe(spans: "Sequence[Span]", unit: str) -> str:
    """Return text that lists ranges of prompt lengths or rates, each with the better kind of prefill: "apart"
    (disaggregated) or "together" (colocated). If `unit` is empty, the limits of a range are shown as whole numbers.
    Otherwise `unit` is their number format, for example ".3g"."""
    if not spans:
        return "both are full at any rate"

    def number(value: float) -> str:
        return format(value, unit) if unit else str(int(value))

    return "; ".join(
        f"{number(span.first)} to {number(span.last)}: {_EXPLAINED.get(span.better, span.better)}" for span in spans
    )


def _sides_table(found: Explanation) -> "Table":
    from deploy.options.screen import number_table

    table = number_table("predicted", ("", "apart", "together"), words="")
    rows: list[tuple[str, Callable[[Side], str]]] = [
        ("prefill, ms", lambda side: _ms(side.terms.prefill_s)),
        ("wait for decode steps, ms", lambda side: _ms(side.terms.steps_s)),
        ("transfer, ms", lambda side: _ms(side.terms.transfer_s)),
        ("first token, ms", lambda side: _ms(side.first_s)),
        ("time per output token, ms", lambda side: _ms(side.token_s)),
        ("longest step, ms", lambda side: _ms(side.longest_step_s)),
        ("whole answer, s", lambda side: f"{side.answer_s:.4g}"),
        ("ranks of the chain", lambda side: str(side.num_ranks or "-")),
        ("sequences per engine", lambda side: f"{side.num_rows:.3g}"),
        ("time spent on prefill", lambda side: f"{side.prefill_load:.1%}"),
    ]
    for name, text in rows:
        table.add_row(name, *("full" if side is None else text(side) for side in (found.apart, found.together)))
    table.add_row("capacity, requests/s", *(f"{rate:.3g}" for rate in found.capacities))
    return table


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.4g}"


def _by_key(
    spans: "Callable[[Demand, Callable[[Side], float]], tuple[Span, ...]]", demand: "Demand"
) -> dict[str, tuple["Span", ...]]:
    return {
        "first token": spans(demand, lambda side: side.first_s),
        "whole answer": spans(demand, lambda side: side.answer_s),
    }


def _named(args: argparse.Namespace, demand: "Demand", pools: "Pools") -> tuple[str, "ChainPlanner"]:
    """Return the title and the planner for the model and the kind of rank that the options name."""
    from baton.planning.hardware import ModelCosts
    from baton.planning.local_prefill import LocalPrefill
    from baton.planning.planner import ChainPlanner
    from generate_workers.config import EngineConfig

    name = (args.hardware or DEFAULT_HARDWARE).lower()
    rates = _linked(args, hardware_of(name))
    model = find_model(args)
    if model.shape is None:
        raise InvalidArgumentError("--params: a break-even needs the model's shape: give MODEL or --shape")
    engine = EngineConfig()
    planner = ChainPlanner(
        ModelCosts.of(model.shape, rates, bytes_per_weight=model.model.weight_bytes),
        max_ranks=pools.num_ranks,
        max_tokens=min(_LONGEST * demand.prompt_tokens, MAX_TOKENS),
        local=LocalPrefill(1.0, engine.max_batched_tokens),
    )
    link = f"links {rates.link.bandwidth / 1e9:g} GB/s"
    return f"{model.name}, {model.formats}, on {name}, {link}: nominal rates", planner


def _here(args: argparse.Namespace, pools: "Pools") -> tuple[str, "ChainPlanner"]:
    """Return the title and the planner of a cluster with these pools on this machine, as `baton serve` makes it."""
    if args.link_gb_s is not None or args.shape or args.params:
        raise InvalidArgumentError("--hardware here predicts by this machine's rates: give MODEL, and no link")
    from rich.console import Console

    from deploy.config.environment import DEFAULT_MODEL
    from deploy.config.file import load_config
    from deploy.machine.cluster_plan import ClusterPlan
    from deploy.machine.model_folder import resolve_folder
    from deploy.machine.planners import served_planner, worker_profiles
    from deploy.machine.resolved_model import ResolvedModel
    from deploy.machine.this_machine import inspect_machine

    machine = inspect_machine()
    device = "cuda" if machine.gpus and machine.has_cuda else "cpu"
    settings = {
        "prefill.device": device,
        "generate.device": device,
        "model.name": args.model or DEFAULT_MODEL,
        "model.dtype": args.dtype,
        "model.weights": args.weights or "stored",
        "prefill.num_ranks": pools.num_ranks,
        "generate.num_threads": option_values.count("--threads", args.threads, 4096) if args.threads else 0,
    }
    config = load_config(None, [f"{name}={value}" for name, value in settings.items()])
    folder = resolve_folder(config.model.name, config.model.cache, Console(stderr=True))
    plan = ClusterPlan(config, ResolvedModel(folder))
    rank, engine = worker_profiles(plan)
    rates = basis(rank.is_measured and engine.is_measured)
    return f"{folder.name} on {rank.name}: {rates}", served_planner(plan)


def _linked(args: argparse.Namespace, rates: Hardware) -> Hardware:
    if args.link_gb_s is None:
        return rates
    bandwidth = option_values.positive("--link-gb-s", args.link_gb_s) * 1e9
    return dataclasses.replace(rates, link=dataclasses.replace(rates.link, bandwidth=bandwidth))


def _pools(args: argparse.Namespace) -> "Pools":
    from baton_lab.study.break_even import Pools

    return Pools(
        num_groups=_count(args, "groups", MAX_WORKERS),
        num_ranks=_count(args, "ranks", 64),
        num_engines=_count(args, "engines", MAX_WORKERS),
        num_slots=_count(args, "slots", MAX_WORKERS),
    )


def _is_here(args: argparse.Namespace) -> bool:
    return args.hardware is not None and args.hardware.lower() == HERE


def _given(args: argparse.Namespace, name: str) -> str:
    given = getattr(args, name)
    return _DEFAULTS[name] if given is None else str(given)


def _count(args: argparse.Namespace, name: str, most: int) -> int:
    return option_values.count(f"--{name}", _given(args, name), most)
