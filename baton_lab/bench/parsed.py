"""Parses the options of `baton bench`: the style of requests, the conversations, and the loads."""

import argparse
import json
import secrets
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from baton.errors import InvalidArgumentError
from baton_lab.bench.conversations import Shape
from baton_lab.bench.lengths import MIXES
from baton_lab.bench.loops import Arrivals, Load, Users
from baton_lab.bench.options import MAX_REQUESTS, MAX_USERS, SECONDS
from baton_lab.bench.server import Style
from baton_lab.traffic.traces.arrivals import gamma_arrivals, gamma_arrivals_until
from baton_lab.traffic.traces.trace import MAX_TOKENS, Trace
from baton_lab.traffic.traces.trace_files import read_trace
from deploy.options import numbers as option_values


@dataclass(frozen=True)
class Loads:
    """The loads of one command, sent one after the other."""

    loads: tuple[Load, ...]
    trace: Trace | None = None
    """Trace that the loads replay. None: requests are generated."""


def style(args: argparse.Namespace) -> Style:
    """Return the request style that the options give. Raises InvalidArgumentError, which names the invalid option."""
    return Style(
        is_chat=args.api == "chat",
        temperature=option_values.positive("--temperature", args.temperature, or_zero=True),
        ignores_eos=not args.allow_eos,
        timeout_s=option_values.positive("--timeout", args.timeout),
        extra=_extra(args),
    )


def shape(args: argparse.Namespace) -> Shape:
    """Return the conversation parameters that the options give; `context_tokens` is None without --context. Raises
    InvalidArgumentError, which names the invalid option."""

    def tokens(option: str, text: str | None) -> int | None:
        return None if text is None else option_values.count(option, text, MAX_TOKENS)

    if args.lengths not in MIXES:
        raise InvalidArgumentError(f"--lengths = {args.lengths!r} is unknown: use one of {', '.join(MIXES)}")
    around = tokens("--prompt-tokens", args.prompt_tokens), tokens("--output-tokens", args.output_tokens)
    return Shape(
        MIXES[args.lengths].around(*around),
        num_turns=option_values.count("--turns", args.turns, 10_000),
        system_tokens=option_values.count("--system-tokens", args.system_tokens, MAX_TOKENS, least=0),
        think_s=option_values.positive("--think-time", args.think_time, or_zero=True),
        num_prompts=option_values.count("--repeat-prompts", args.repeat_prompts, MAX_REQUESTS, least=0),
        context_tokens=tokens("--context", args.context),
    )


def loads(args: argparse.Namespace, seed: int) -> Loads:
    """Return the loads that the options describe, determined by `seed`. Raises InvalidArgumentError, which names the
    invalid option."""
    seconds = None if args.seconds is None else option_values.positive("--seconds", args.seconds)
    num = None if args.requests is None else option_values.count("--requests", args.requests, MAX_REQUESTS)
    rates = None if args.rate is None else option_values.ascending("--rate", args.rate, option_values.positive)
    burstiness = option_values.positive("--burstiness", args.burstiness)
    if args.concurrency is not None and (rates is not None or args.trace is not None):
        raise InvalidArgumentError("--concurrency is a closed loop, --rate and --trace are open: give one of them")
    if args.trace is not None:
        return _replayed(args, rates, seconds, num)
    bound_s = SECONDS if seconds is None and num is None else seconds
    if args.concurrency is not None:
        users = option_values.counts("--concurrency", args.concurrency, MAX_USERS)
        return Loads(tuple(_users(each, num, bound_s) for each in users))
    if rates is None:
        raise InvalidArgumentError("no load: give --rate, --concurrency or --trace")
    return Loads(tuple(_arrivals(rate, burstiness, (num, bound_s), seed) for rate in rates))


def seed(args: argparse.Namespace) -> int:
    """Return the seed given by --seed, or a random one."""
    if args.seed is None:
        return secrets.randbelow(2**31)
    return option_values.count("--seed", args.seed, 2**31, least=0)


def _extra(args: argparse.Namespace) -> dict[str, Any]:
    if args.extra_body is None:
        return {}
    if args.url is None:
        raise InvalidArgumentError("--extra-body goes with --url: leave it out with --address")
    try:
        found = json.loads(args.extra_body)
    except ValueError as error:
        raise InvalidArgumentError(
            f"--extra-body is not valid JSON ({error}): write for example '{{\"top_k\": 5}}'"
        ) from error
    if not isinstance(found, dict):
        raise InvalidArgumentError("--extra-body is not an object: write for example '{\"top_k\": 5}'")
    return found


def _users(num_users: int, num: int | None, seconds: float | None) -> Users:
    return Users(f"{num_users} users", num_users, num, float("inf") if seconds is None else seconds)


def _arrivals(rate: float, burstiness: float, bounds: tuple[int | None, float | None], seed: int) -> Arrivals:
    """Return the arrivals at `rate`, limited by a number of requests, by seconds, or by both. All rates of a sweep use
    the same sequence of gaps, scaled to the rate."""
    (num, seconds), generator = bounds, np.random.default_rng([seed, 1])
    if seconds is None:
        assert num is not None, "a load has a bound"
        at_s = gamma_arrivals(rate, burstiness, num, generator)
    else:
        at_s = gamma_arrivals_until(seconds, rate, burstiness, generator)[:num]
    if not len(at_s):
        raise InvalidArgumentError(f"--rate {rate:g}: no request begins in {seconds:g} s: give a longer --seconds")
    return Arrivals(f"{rate:g}/s", rate, at_s.tolist())


def _replayed(
    args: argparse.Namespace, rates: tuple[float, ...] | None, seconds: float | None, num: int | None
) -> Loads:
    """Return the loads that replay a trace: one for each of `rates`, or one at the trace's own mean rate."""
    if args.turns != "1" or args.prompt_tokens is not None or args.output_tokens is not None:
        raise InvalidArgumentError(
            "--trace sets the lengths of requests: leave out --turns, --prompt-tokens and --output-tokens"
        )
    trace = read_trace(args.trace)
    if num is not None:
        trace = trace.first(num)
    own = (len(trace) - 1) / trace.duration_s if trace.duration_s else 1.0
    made = []
    for rate in rates or (own,):
        faster = trace.faster(rate / own)
        kept = faster.arrivals_s if seconds is None else faster.arrivals_s[faster.arrivals_s < seconds]
        made.append(Arrivals(f"{trace.name} at {rate:.3g}/s", rate, kept.tolist()))
    return Loads(tuple(made), trace)


def within(made: Shape, context_tokens: int | None) -> Shape:
    """Return the shape `made` with the context length `context_tokens` that the server reports (None: not reported). If
    an option set the context length, return the shape unchanged."""
    return made if made.context_tokens is not None else replace(made, context_tokens=context_tokens)
