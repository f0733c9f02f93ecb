"""`baton calibrate`: measures the costs of prefill on a running cluster, and sends the costs to the cluster, which uses
them for its predictions.

`baton.planning.fit` fits the costs. `baton.planning.calibration` writes the calibration file. docs/kv_runahead.md
explains calibrations.
"""

import argparse
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from baton.errors import ConfigError, InvalidArgumentError, UnavailableError
from deploy.commands.admin_channel import add_cluster, add_key_option, admin_channel, given_key
from deploy.options import numbers as option_values
from deploy.options.subcommand import add_command

if TYPE_CHECKING:
    from rich.console import Console

    from baton import Client
    from baton.v1.planning_pb2_grpc import PlanningStub
    from deploy.tuning.calibration.chains import ChainFit

_ANSWER_S = 10.0
_USE_S = 120.0
"""Timeout in seconds for the orchestrator's answer after new costs were sent. The orchestrator first searches for the
best partitions of prompts under the new costs."""
_MAX_REPEATS = 1000

_DESCRIPTION = """\
Measures prefill on a running cluster that serves no requests, and fits the cost model with which the orchestrator
predicts times. The command sends prompts of several lengths and reads the computation time of each rank. It fits these
costs: the time per token, the time per pair of tokens in attention, the fixed time per layer, the bandwidth and latency
of links between ranks, and the time that a request spends outside the chain. Prompts of other lengths (--checks) show
the errors of the predictions.

The orchestrator uses the new costs immediately and after restarts. Other clusters with the same model on the same
hardware use them when they start.

With --generate, the command measures generation steps instead. It runs batches of sequences, and makes a table of step
times by number of sequences and number of tokens per sequence. With this table, the orchestrator decides which prompts
a generation group prefills itself."""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the `calibrate` command to the command line."""
    text = "measure prefill or generation on a running cluster, to improve its predictions"
    parser = add_command(commands, run, "calibrate", text, _DESCRIPTION)
    add_cluster(parser)
    text = "measure generation steps instead of prefill"
    parser.add_argument("--generate", action="store_true", help=text)
    for name, text in (
        ("--batches", "batch sizes in sequences, with --generate (default: 1, 4, 16, 64 and the number of slots)"),
        ("--contexts", "tokens per sequence, with --generate (default: 192, 1024 and 4096, if a slot holds them)"),
        ("--lengths", "prompt lengths in tokens, for the fit (default: six, up to 3/4 of the maximum length)"),
        ("--checks", "prompt lengths in tokens, to check predictions (default: one between each two of --lengths)"),
    ):
        parser.add_argument(name, metavar="N,N,...", help=text)
    text = "number of prompts of each length (default: 5); with --generate, of runs of each batch (default: 2)"
    parser.add_argument("--repeats", type=int, metavar="N", help=text)
    text = "file for a copy of the results, which `baton simulate` and `baton simulate-traffic` can read"
    parser.add_argument("--output", type=Path, metavar="FILE", help=text)
    parser.add_argument("--dry-run", action="store_true", help="print the results without changing the cluster")
    text = "measure even if the cluster serves requests, which distort the results and become slower"
    parser.add_argument("--anyway", action="store_true", help=text)
    text = "use the results even if the new predictions differ greatly from the present ones"
    parser.add_argument("--force", action="store_true", help=text)
    add_key_option(parser)


def run(args: argparse.Namespace) -> int:
    """Run `baton calibrate`; return the exit status."""
    _check_options(args)
    # Local imports, so that --help and mistyped options need neither grpc nor numpy.
    from rich.console import Console

    from baton import Client
    from baton.planning import json_file
    from baton.v1.planning_pb2_grpc import PlanningStub
    from deploy.commands.record import secret_for, serving_endpoint
    from deploy.tuning.calibration.generation import measured_steps

    console = Console(stderr=True, highlight=False)
    target, api_key = args.target or serving_endpoint(args.name), given_key(args)
    with (
        admin_channel(target, secret_for(args.target, args.name), api_key) as channel,
        Client(target, api_key=api_key) as client,
    ):
        stub = PlanningStub(channel)
        _require_idle(client, "generate" if args.generate else "prefill", args.anyway)
        measured = measured_steps if args.generate else _measured_chains
        text = measured(args, client, stub, console)
        if args.output is not None:
            json_file.write(args.output, text)
            console.print(f"written to {args.output}")
        if args.dry_run:
            console.print("the cluster predicts as before (--dry-run)")
        else:
            path = _hand_over(args, stub, text)
            console.print(f"the cluster predicts by it from now on, and keeps it in {path}")
    return 0


def _check_options(args: argparse.Namespace) -> None:
    """Raise an error for options that are out of range or belong to the other kind of measurement. Set the number of
    repeats."""
    for name in ("lengths", "checks") if args.generate else ("batches", "contexts"):
        if getattr(args, name) is not None:
            raise InvalidArgumentError(f"--{name}: only {'without' if args.generate else 'with'} --generate")
    if args.repeats is None:
        args.repeats = 2 if args.generate else 5
    if not 1 <= args.repeats <= _MAX_REPEATS:
        raise InvalidArgumentError(f"--repeats {args.repeats} is out of range: use 1 to {_MAX_REPEATS}")


def _hand_over(args: argparse.Namespace, stub: "PlanningStub", text: str) -> str:
    """Send the text of a calibration or of a table of step times to the cluster. Return the path at which the
    orchestrator stores it."""
    from baton.v1 import planning_pb2 as pb

    if args.generate:
        times = pb.UseStepTimesRequest(step_times=text, force=args.force)
        return stub.UseStepTimes(times, timeout=_ANSWER_S).path or "no file"
    calibration = pb.UseCalibrationRequest(calibration=text, force=args.force)
    return stub.UseCalibration(calibration, timeout=_USE_S).path or "no file"


def _require_idle(client: "Client", role: str, anyway: bool) -> None:
    """Raise an error if the cluster has no group of this role, or if it is serving requests and `anyway` is false."""
    state = client.cluster_state()
    if not any(group.role == role for group in state.groups):
        raise ConfigError(f"the cluster has no {role} group, so there is nothing to measure: set {role}.num_groups")
    num_requests = state.num_running + state.num_queued
    if num_requests and not anyway:
        raise UnavailableError(
            f"the cluster serves {num_requests} requests, which would disturb the measurement and be disturbed: "
            "calibrate when it is idle, or with --anyway"
        )


def _measured_chains(args: argparse.Namespace, client: "Client", stub: "PlanningStub", console: "Console") -> str:
    """Measure chains, show the fitted costs, and return the text of the calibration's file."""
    from random import Random

    from baton.planning.calibration import dumps, loads
    from baton.v1 import planning_pb2 as pb
    from deploy.options.screen import progress
    from deploy.tuning.calibration.chains import LEAST_TOKENS, evaluate, fitted_lengths, lengths_between, measure

    origin = loads(stub.GetCalibration(pb.GetCalibrationRequest(), timeout=_ANSWER_S).calibration, "cluster")
    max_tokens = client.model().max_tokens
    in_range = partial(option_values.counts, most=max_tokens - 1, least=LEAST_TOKENS)  # 1 less: an output token
    lengths = in_range("--lengths", args.lengths) if args.lengths else fitted_lengths(max_tokens)
    checks = in_range("--checks", args.checks) if args.checks else lengths_between(lengths)
    if len(lengths) < 2:
        raise InvalidArgumentError(f"--lengths {args.lengths}: one length cannot separate the costs: give two or more")
    everything = sorted({*lengths, *checks})
    with progress(console, "measuring", sum(everything) * (args.repeats + 1)) as done:
        samples = measure(client, everything, repeats=args.repeats, rng=Random(), done=done)
    outcome = evaluate(origin, samples, lengths)
    _show(outcome, console)
    return dumps(outcome.calibration)


def _show(outcome: "ChainFit", console: "Console") -> None:
    """Print the fitted costs, and the errors of their predictions."""
    from rich.table import Table

    calibration, cost = outcome.calibration, outcome.calibration.cost
    console.print(f"{calibration.model} on {calibration.hardware} (fingerprint {calibration.fingerprint})")
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for name, value in (
        ("a token through a layer", f"{cost.linear_s * 1e6:.3f} us"),
        ("a pair of tokens in a layer's attention", f"{cost.pair_s * 1e9:.3f} ns"),
        ("a layer, for any chunk", f"{cost.fixed_s * 1e6:.1f} us"),
        ("a message between ranks", f"{cost.link.latency_s * 1e6:.0f} us, and {cost.link.bandwidth / 1e6:.0f} MB/s"),
        ("a request, outside its chain", f"{cost.head_s * 1e3:.1f} ms"),
        ("largest residual of the fit", f"{outcome.residual:.1%} of a rank's seconds"),
    ):
        table.add_row(name, value)
    console.print(table)
    if outcome.width < outcome.num_ranks:
        console.print(
            f"no prompt was divided among all {outcome.num_ranks} ranks of a group: fitted to chains of "
            f"{outcome.width}; give longer --lengths if longer prompts are to come"
        )
    headings = ("tokens", "by rank", "measured s", "predicted s", "off", "predicted before", "")
    times = Table(*headings, box=None, title="time to first token, median", title_justify="left")
    for check in outcome.checks:
        times.add_row(
            str(check.num_tokens),
            " ".join(map(str, check.chunks)),
            f"{check.measured_s:.4f}",
            f"{check.predicted_s:.4f}",
            f"{check.error:+.1%}",
            f"{check.former_s:.4f}",
            "fitted" if check.is_fitted else "",
        )
    console.print(times)
    console.print(f"median deviation where nothing was fitted: {outcome.median_error:.1%}")
