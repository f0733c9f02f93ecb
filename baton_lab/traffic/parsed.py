"""Parses the options of `baton simulate-traffic`: the trace, the machines, the groups and the targets."""

import argparse
from pathlib import Path

from baton.errors import InvalidArgumentError
from baton.planning.hardware import ModelCosts
from baton_lab.study.known_hardware import hardware_of
from baton_lab.study.known_models import shape_of
from baton_lab.traffic.comparing import Setting
from baton_lab.traffic.options import GENERATORS
from baton_lab.traffic.service import GroupSizes, RecallingPlanner
from baton_lab.traffic.traces import generators
from baton_lab.traffic.traces.generators import Lengths, Phase
from baton_lab.traffic.traces.trace import MAX_TOKENS, Trace
from baton_lab.traffic.traces.trace_files import read_trace
from deploy.options import numbers as option_values
from orchestrator.requests.config import AutoscalingConfig

MAX_GROUPS = 20_000
_SEARCHED_TOKENS = 8192
_MAX_REQUESTS = 10_000_000


def setting(args: argparse.Namespace) -> Setting:
    """Return the cluster that the options describe. Raises InvalidArgumentError or ConfigError; the message names the
    invalid option."""
    start = _pair(args.groups)
    most = sum(start) if args.max is None else option_values.count("--max", args.max, MAX_GROUPS, least=2)
    least = 2 if args.min is None else option_values.count("--min", args.min, most, least=0)
    sizes = GroupSizes(
        option_values.count("--ranks", args.ranks, 64),
        option_values.count("--slots", args.slots, 4096),
        option_values.positive("--cold-start", args.cold_start, or_zero=True),
        option_values.positive("--flip", args.flip, or_zero=True),
    )
    config = AutoscalingConfig(
        ttft_p95_s=option_values.positive("--ttft", args.ttft),
        itl_p95_s=option_values.positive("--itl", args.itl),
        min=least,
        max=most,
        cooldown_s=option_values.positive("--cooldown", args.cooldown),
        mode="advise" if args.advisory else "act",
    )
    max_blocks = option_values.count("--cached-blocks", args.cached_blocks, 2**30, least=0)
    return Setting(planner(args, sizes.num_ranks), sizes, config, start, max_blocks, args.whole_chooser)


def planner(args: argparse.Namespace, num_ranks: int) -> RecallingPlanner:
    """Return the orchestrator's planner for the model and machine that the options name."""
    costs = ModelCosts.of(shape_of(args.model), hardware_of(args.hardware))
    return RecallingPlanner(costs, max_ranks=num_ranks, max_tokens=_SEARCHED_TOKENS)


def trace(args: argparse.Namespace, on: Setting) -> Trace:
    """Return the trace that the options name. It is generated, or read from a file."""
    made = _generated(args, on) if args.trace in GENERATORS else read_trace(Path(args.trace))
    if args.speed is not None:
        made = made.faster(option_values.positive("--speed", args.speed))
    if args.requests is not None:
        made = made.first(option_values.count("--requests", args.requests, _MAX_REQUESTS))
    return made


def _generated(args: argparse.Namespace, on: Setting) -> Trace:
    if args.rate is not None and args.load is not None:
        raise InvalidArgumentError("--rate and --load say the same: leave one out")
    seconds = option_values.positive("--seconds", args.seconds)
    seed = option_values.count("--seed", args.seed, 2**31, least=0)
    tokens = [option_values.count(f"--{name}", getattr(args, name), MAX_TOKENS) for name in ("prompt", "output")]
    lengths = Lengths(*tokens)

    def rate(of: Lengths) -> float:
        if args.rate is not None:
            return option_values.positive("--rate", args.rate)
        return option_values.positive("--load", args.load or "0.85") * on.predicted_rate(of)

    if args.trace == "shifting":
        num_phases = option_values.count("--phases", args.phases, 1000)
        kinds = [(generators.PROMPT_HEAVY, generators.OUTPUT_HEAVY)[phase % 2] for phase in range(num_phases)]
        return generators.shifting([Phase(seconds / num_phases, rate(kind), kind) for kind in kinds], seed)
    if args.trace == "bimodal":
        share = 0.3
        heavy, light = generators.PROMPT_HEAVY, generators.OUTPUT_HEAVY
        mixed = 1 / (share / rate(heavy) + (1 - share) / rate(light))
        return generators.bimodal(mixed, seconds, seed, (heavy, light), share)
    made = {"steady": generators.steady, "bursty": generators.bursty, "diurnal": generators.diurnal}[args.trace]
    return made(rate(lengths), seconds, seed, lengths)


def _pair(text: str) -> tuple[int, int]:
    first, colon, second = text.partition(":")
    if not colon:
        raise InvalidArgumentError(f"--groups = {text!r}: give prefill and generation groups, like 4:4")
    return (option_values.count("--groups", first, MAX_GROUPS), option_values.count("--groups", second, MAX_GROUPS))
