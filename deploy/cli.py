"""Entry point of the `baton` command line. If a command raises a BatonError, or a package cannot be imported, the
process prints one line (the error, its location, the remedy) and exits with status 1 or 2."""

import argparse
import sys
import traceback

from baton import __version__
from baton.errors import BatonError, ConfigError, InvalidArgumentError
from baton_lab import commands as lab
from deploy.commands import drain, flip, generate, inspection, local, reload, scale, serving
from deploy.front_doors import gateway, http
from deploy.top import command as top
from deploy.traces import command as trace
from deploy.tuning import calibrate
from deploy.tuning.selection import prepare

GROUPS = {
    "serve": ("serve", "local", "generate", "status", "stop", "gateway", "http"),
    "operate": ("drain", "scale", "flip", "reload", "top", "trace", "doctor", "config"),
    "plan": ("plan", "simulate", "simulate-traffic"),
    "tune": ("calibrate", "prepare"),
    "lab": ("evaluate", "chaos", "bench"),
}
"""Commands by topic, in the order in which `baton --help` lists them."""
_MODULES = (
    *(generate, local, serving, gateway, http, drain, flip, reload, scale, inspection, trace, top, calibrate),
    *(prepare, *lab.COMMANDS),
)

_OURS = ("baton", "baton_lab", "deploy", "gateway", "generate_workers", "orchestrator", "prefill_workers")
"""Names of Baton's own packages. If one of them cannot be imported, the error is reported as a defect of Baton, not as
a missing dependency."""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line. Each command sets the attribute `run` to the function that executes
    it."""
    parser = argparse.ArgumentParser(
        prog="baton",
        usage="baton [-h] [--version] COMMAND ...",
        description="Serves large language models with prefill and generation disaggregated.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"baton {__version__}")
    commands = parser.add_subparsers(required=True, prog=parser.prog, metavar="COMMAND", help=argparse.SUPPRESS)
    for module in _MODULES:
        module.add_parser(commands)
    texts = {each.dest: each.help for each in commands._choices_actions}
    parser.epilog = "\n".join(_listed(group, {name: texts[name] or "" for name in GROUPS[group]}) for group in GROUPS)
    return parser


def _listed(group: str, texts: dict[str, str]) -> str:
    return "\n".join([f"{group}:", *(f"  {name:<17} {text}" for name, text in texts.items()), ""])


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
    except ImportError as error:
        package = _failed_package(error)
        if package in _OURS:
            raise  # a defect, not an installation that lacks a package
        reason = str(error).strip().partition("\n")[0]
        remedy = "run `pip install 'baton-serve[serve]'`"
        print(f"baton: package {package} cannot be imported ({reason}): {remedy}", file=sys.stderr)
        return 1
    return status


def _failed_package(error: ImportError) -> str:
    """Return the name of the package that cannot be imported. If the error has no name, return the package of the
    module that raised it."""
    *_, (raising, _) = traceback.walk_tb(error.__traceback__)
    return (error.name or str(raising.f_globals["__name__"])).partition(".")[0]


if __name__ == "__main__":
    sys.exit(main())
