"""`baton simulate-traffic`: replays a trace against a simulated cluster, and compares scaling policies.

It needs no cluster, no model and no torch. The orchestrator's policies run with the simulator's clock
(`baton_lab.traffic.simulation`), and the cost model predicts all durations.
"""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from baton.errors import ConfigError, InvalidArgumentError
from baton_lab.traffic import options
from deploy.options.subcommand import add_command

if TYPE_CHECKING:
    from baton_lab.traffic.comparing import Setting
    from baton_lab.traffic.results import Results

_DESCRIPTION = """\
Simulates a cluster that serves a trace: a list of requests with arrival times and lengths, which is generated or read
from a file. Admission, placement and the autoscaler are the code of the orchestrator. A cost model predicts all times,
so the results are predictions, not measurements. For each scaling policy, the command prints latencies, goodput
(requests per second that meet both latency targets) and cost (seconds of running groups):

  static        the groups of --groups, without changes
  best-static   the best fixed division of --max groups, found by simulating each division
  autoscale     Baton's autoscaler, which forecasts traffic, predicts latencies, and adds, removes or flips groups
  queue         for comparison: thresholds on the lengths of queues
  load          for comparison: load divided by the throughput of a group, without a model of queues

A division is a number of prefill groups and a number of generation groups. A flip moves a group to the other role."""

_EXAMPLES = """\
examples:
  baton simulate-traffic --policy static,autoscale,queue,load,best-static
  baton simulate-traffic --trace azure.csv --groups 2:6 --policy autoscale --json result.json --plot result.png
  baton simulate-traffic --trace steady --rate 5000 --seconds 200 --groups 500:500 --policy static"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the `simulate-traffic` command to the command line."""
    text = "predict latencies under traffic, with fixed and with autoscaled groups"
    parser = add_command(commands, run, "simulate-traffic", text, _DESCRIPTION, examples=_EXAMPLES)
    parser.add_argument("--policy", default="static", metavar="NAME,...", help="policies to compare (default: static)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="JSON file for all numbers and decisions")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="PNG file for a plot; needs the extra 'lab'")
    parser.add_argument("--explain", action="store_true", help="print each decision of the policies, with its reasons")
    options.add_trace_options(parser)
    options.add_cluster_options(parser)


def run(args: argparse.Namespace) -> int:
    """Run `baton simulate-traffic`; return the exit status."""
    from rich.console import Console

    from baton_lab.plot import require_plots
    from baton_lab.study.known_hardware import hardware_title
    from baton_lab.traffic import parsed
    from baton_lab.traffic.comparing import POLICIES
    from baton_lab.traffic.report import decisions, table

    policies = [each.strip() for each in args.policy.split(",")]
    for policy in policies:
        if policy not in POLICIES:
            raise InvalidArgumentError(f"--policy: {policy!r} is unknown: use some of {', '.join(POLICIES)}")
    if args.plot is not None:
        require_plots(args.plot)
    on = parsed.setting(args)
    trace = parsed.trace(args, on)
    console = Console()
    with Console(stderr=True).status("simulating") as status:
        runs = {}
        for policy in policies:
            status.update(f"simulating {policy}")
            name, results = on.run(trace, policy)
            runs[name] = results
    console.print(table(trace, runs, on.targets, hardware_title(args.hardware)))
    if args.explain:
        for name, results in runs.items():
            console.print(decisions(name, results), soft_wrap=True, highlight=False)
    if args.json is not None:
        _write_json(args.json, runs, on)
    if args.plot is not None:
        from baton_lab.traffic.plot import draw

        draw(trace, runs, on.targets, args.plot)
    return 0


def _write_json(path: Path, runs: "dict[str, Results]", on: "Setting") -> None:
    """Write the results of all runs. Raises ConfigError if the path cannot be written to."""
    numbers = {name: results.summary(on.targets) for name, results in runs.items()}
    try:
        path.write_text(json.dumps(numbers, indent=1, allow_nan=False) + "\n")
    except OSError as error:
        raise ConfigError(
            f"--json = {str(path)!r} cannot be written ({error.strerror}): choose another path"
        ) from error
