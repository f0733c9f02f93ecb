"""Command-line options of `baton simulate-traffic`; `baton_lab.traffic.parsed` parses their values. Imports little,
because every `baton` command loads this module."""

import argparse

from baton_lab.study.known_hardware import HARDWARE
from baton_lab.study.known_models import SHAPES

GENERATORS = ("steady", "bursty", "diurnal", "bimodal", "shifting")


def add_trace_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that describe the trace."""
    group = parser.add_argument_group("traffic")
    names = ", ".join(GENERATORS)
    text = f"generated trace ({names}), or a trace file (default: %(default)s)"
    group.add_argument("--trace", default="shifting", metavar="TRACE", help=text)
    text = "duration of a generated trace in seconds (default: %(default)s)"
    group.add_argument("--seconds", default="600", metavar="S", help=text)
    group.add_argument("--rate", metavar="R", help="mean number of requests per second (default: set by --load)")
    text = "rate, as a fraction of the predicted capacity of the best division of --max groups (default: 0.85)"
    group.add_argument("--load", metavar="X", help=text)
    group.add_argument("--speed", metavar="X", help="factor by which the trace is replayed faster (default: 1)")
    group.add_argument("--requests", metavar="N", help="number of requests from the start of the trace (default: all)")
    text = "mean number of prompt tokens of a steady, bursty or diurnal trace (default: %(default)s)"
    group.add_argument("--prompt", default="1500", metavar="N", help=text)
    text = "mean number of output tokens of a steady, bursty or diurnal trace (default: %(default)s)"
    group.add_argument("--output", default="200", metavar="N", help=text)
    text = "number of phases of a shifting trace (default: %(default)s)"
    group.add_argument("--phases", default="4", metavar="N", help=text)
    group.add_argument("--seed", default="0", metavar="N", help="seed of a generated trace (default: %(default)s)")


def add_cluster_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that describe the cluster."""
    group = parser.add_argument_group("groups")
    text = "initial numbers of prefill and generation groups (default: %(default)s)"
    group.add_argument("--groups", default="4:4", metavar="P:G", help=text)
    group.add_argument(
        "--ranks", default="1", metavar="N", help="number of ranks of a prefill group (default: %(default)s)"
    )
    group.add_argument(
        "--slots", default="32", metavar="N", help="number of slots of a generation group (default: %(default)s)"
    )
    text = "time in seconds until a new group serves (default: %(default)s)"
    group.add_argument("--cold-start", default="30", metavar="S", help=text)
    text = "time in seconds for the flip of an idle group (default: %(default)s)"
    group.add_argument("--flip", default="2", metavar="S", help=text)
    text = "number of KV blocks that a prefill group can cache, for traces with block ids (default: 0)"
    group.add_argument("--cached-blocks", default="0", metavar="N", help=text)
    text = "compare all groups for each placement, as the orchestrator does, not a few; slow for hundreds of groups"
    group.add_argument("--whole-chooser", action="store_true", help=text)
    group = parser.add_argument_group("targets and scaling")
    text = "target for the time to first token in seconds (default: %(default)s)"
    group.add_argument("--ttft", default="2", metavar="S", help=text)
    text = "target for the time between tokens in seconds (default: %(default)s)"
    group.add_argument("--itl", default="0.05", metavar="S", help=text)
    group.add_argument("--min", metavar="N", help="minimum number of groups of both roles together (default: 2)")
    text = "maximum number of groups of both roles together (default: that of --groups)"
    group.add_argument("--max", metavar="N", help=text)
    text = "time in seconds for which fewer groups must be enough before some are removed (default: %(default)s)"
    group.add_argument("--cooldown", default="60", metavar="S", help=text)
    text = "let the policy autoscale only record its decisions, without changing groups"
    group.add_argument("--advisory", action="store_true", help=text)
    group = parser.add_argument_group("model and machine")
    text = f"model: {', '.join(SHAPES)} (default: %(default)s)"
    group.add_argument("--model", default="llama-3.1-8b", metavar="NAME", help=text)
    text = f"hardware: {', '.join(HARDWARE)}, or here for this machine (default: %(default)s)"
    group.add_argument("--hardware", default="h100-flash", metavar="NAME", help=text)
