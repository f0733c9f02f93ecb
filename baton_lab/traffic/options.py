"""Command-line options of `baton simulate-traffic`; `baton_lab.traffic.parsed` parses their values. Imports little,
because every `baton` command loads this module."""

import argparse
from pathlib import Path

from baton_lab.study.known_hardware import HARDWARE
from baton_lab.study.known_models import SHAPES

GENERATORS = ("steady", "bursty", "diurnal", "bimodal", "shifting")


def add_trace_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that describe the trace."""
    group = parser.add_argument_group("traffic")
    names = ", ".join(GENERATORS)
    group.add_argument(
        "--trace", default="shifting", metavar="TRACE", help=f"{names}, or a file (default: %(default)s)"
    )
    group.add_argument(
        "--seconds", default="600", metavar="S", help="length of a generated trace (default: %(default)s)"
    )
    group.add_argument("--rate", metavar="R", help="mean number of requests per second (default: set by --load)")
    text = "rate as a fraction of the predicted capacity of the best fixed division of --max groups (default: 0.85)"
    group.add_argument("--load", metavar="X", help=text)
    group.add_argument("--speed", metavar="X", help="factor by which a file is replayed faster (default: 1)")
    group.add_argument("--requests", metavar="N", help="only the first N requests (default: all)")
    group.add_argument("--prompt", default="1500", metavar="N", help="mean prompt tokens (default: %(default)s)")
    group.add_argument("--output", default="200", metavar="N", help="mean output tokens (default: %(default)s)")
    group.add_argument("--phases", default="4", metavar="N", help="phases of shifting traffic (default: %(default)s)")
    group.add_argument("--seed", default="0", metavar="N", help="seed of a generated trace (default: %(default)s)")


def add_cluster_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that describe the cluster."""
    group = parser.add_argument_group("groups")
    group.add_argument(
        "--groups", default="4:4", metavar="P:G", help="initial numbers of prefill and generation groups"
    )
    group.add_argument(
        "--ranks", default="1", metavar="N", help="number of ranks of a prefill group (default: %(default)s)"
    )
    group.add_argument(
        "--slots", default="32", metavar="N", help="number of slots of a generation group (default: %(default)s)"
    )
    group.add_argument(
        "--cold-start", default="30", metavar="S", help="seconds until a new group serves (default: %(default)s)"
    )
    group.add_argument(
        "--flip", default="2", metavar="S", help="seconds to change an idle group's role (default: %(default)s)"
    )
    text = "number of KV blocks that a prefill group caches, for traces with block ids (default: 0)"
    group.add_argument("--cached-blocks", default="0", metavar="N", help=text)
    text = "use the complete production chooser for placement; slow for hundreds of groups"
    group.add_argument("--whole-chooser", action="store_true", help=text)
    group = parser.add_argument_group("targets and scaling")
    group.add_argument(
        "--ttft", default="2", metavar="S", help="target seconds to the first token (default: %(default)s)"
    )
    group.add_argument(
        "--itl", default="0.05", metavar="S", help="target seconds between tokens (default: %(default)s)"
    )
    group.add_argument("--min", metavar="N", help="minimum number of groups of both roles (default: 2)")
    group.add_argument("--max", metavar="N", help="maximum number of groups of both roles (default: that of --groups)")
    group.add_argument(
        "--cooldown", default="60", metavar="S", help="seconds before groups leave (default: %(default)s)"
    )
    group.add_argument("--advisory", action="store_true", help="let autoscale only advise, without changing groups")
    group = parser.add_argument_group("model and machine")
    group.add_argument("--model", default="llama-3.1-8b", metavar="NAME", help=f"{', '.join(SHAPES)}")
    group.add_argument("--hardware", default="h100-flash", metavar="NAME", help=f"{', '.join(HARDWARE)}")
    group.add_argument(
        "--calibration", type=Path, metavar="FILE", help="measured costs of prefill, instead of --model and --hardware"
    )
    group.add_argument("--step-times", type=Path, metavar="FILE", help="measured step times; goes with --calibration")
