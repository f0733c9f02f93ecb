"""The `baton` command line. A BatonError ends the process with status 1 or 2 and one line: what, where, remedy."""

import argparse
import sys

from baton import __version__
from baton.errors import BatonError, ConfigError, InvalidArgumentError
from deploy.bench import command as bench
from deploy.calibration import prefill as calibrate
from deploy.chaos import command as chaos
from deploy.commands import drain, flip, generate, inspection, local, reload, scale, serving
from deploy.forecasts import plan, simulate
from deploy.front_doors import gateway, http
from deploy.quality import evaluate, prepare
from deploy.top import command as top
from deploy.traces import command as trace
from deploy.traffic import command as traffic


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line; each command sets `run`."""
    parser = argparse.ArgumentParser(
        prog="baton", description="Serves large language models with prefill and generation disaggregated."
    )
    parser.add_argument("--version", action="version", version=f"baton {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    generate.add_parser(commands)
    local.add_parser(commands)
    serving.add_parser(commands)
    gateway.add_parser(commands)
    http.add_parser(commands)
    drain.add_parser(commands)
    flip.add_parser(commands)
    reload.add_parser(commands)
    scale.add_parser(commands)
    inspection.add_parser(commands)
    trace.add_parser(commands)
    top.add_parser(commands)
    bench.add_parser(commands)
    calibrate.add_parser(commands)
    chaos.add_parser(commands)
    evaluate.add_parser(commands)
    simulate.add_parser(commands)
    traffic.add_parser(commands)
    plan.add_parser(commands)
    prepare.add_parser(commands)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run one command; return the exit status."""
    args = build_parser().parse_args(argv)
    try:
        status: int = args.run(args)
    except KeyboardInterrupt:
        return 130
    except BatonError as error:
        print(f"baton: {error}", file=sys.stderr)
        return 2 if isinstance(error, InvalidArgumentError | ConfigError) else 1
    return status


if __name__ == "__main__":
    sys.exit(main())
