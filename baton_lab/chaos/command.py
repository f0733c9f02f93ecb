"""Command line of `baton chaos`, which runs chaos schedules (baton_lab.chaos.session) on child processes."""

import argparse
from pathlib import Path

from baton.errors import InvalidArgumentError
from baton.settings.paths import cache_folder
from baton_lab.chaos.schedule import NUM_ENGINES
from deploy.config.environment import DEFAULT_MODEL
from deploy.options.subcommand import add_command

_DESCRIPTION = """\
Starts two prefill ranks, two generation engines and an orchestrator as processes of this machine, each behind a proxy
that injects network faults. For each seed it sends the same requests twice: once without faults, and once while it
kills and stops processes (the orchestrator, too), delays, loses, drops and repeats calls, and cancels requests. One
engine hangs: its thread is stopped at any point, and its process still answers. It must be killed within four expected
steps or 10 s, plus two heartbeats, and be replaced. The other gets a fifth of a core for half a minute, and must not be
killed.

Every request must end once, in time, with the tokens of the run without faults. Afterwards no resource may be held, and
slots and bytes must balance. A schedule depends on its seed alone. Exit status 1 if a condition was violated."""

_EXAMPLES = """\
examples:
  baton chaos --seeds 10        ten schedules, one after the other
  baton chaos --seed 7          the seventh again
  baton chaos --hung 2 --slow 0 both engines hang, and none is slow
  baton chaos --set generate.speculation=streaming --set generate.residency=host
  baton chaos --set prefill.device=emulated --set generate.device=emulated --set device.link=25GBps"""

_SECTIONS = "generate", "device"
_FIXED = "num_groups", "num_threads", "num_slots", "max_slot_tokens"
"""Configuration fields that `baton chaos` sets itself, so the user cannot set them."""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the `chaos` command to the command line."""
    text = "start a cluster, inject faults by seeded schedules, and check invariants"
    parser = add_command(commands, run, "chaos", text, _DESCRIPTION, examples=_EXAMPLES)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--seeds", type=int, default=3, metavar="N", help="run schedules 1 to N (default: 3)")
    which.add_argument("--seed", type=int, metavar="K", help="run schedule K only")
    parser.add_argument(
        "--requests", type=int, default=40, metavar="N", help="number of requests in each schedule (default: 40)"
    )
    parser.add_argument(
        "--blows", type=int, default=4, metavar="N", help="number of process faults in each schedule (default: 4)"
    )
    parser.add_argument(
        "--hung", type=int, default=1, metavar="N", help="number of engines that hang in each schedule (default: 1)"
    )
    parser.add_argument(
        "--slow", type=int, default=1, metavar="N", help="number of slow engines in each schedule (default: 1)"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.FIELD=VALUE",
        help="a setting of the engines, or of devices; may be repeated; `baton config` lists all fields",
    )
    parser.add_argument("--model", default=DEFAULT_MODEL, help="Hugging Face folder, GGUF file, or name")
    parser.add_argument("--cache", type=Path, default=cache_folder(), help="folder for converted models")
    parser.add_argument(
        "--log", type=Path, default=Path("chaos.log"), help="file for the logs of the processes (default: chaos.log)"
    )


def run(args: argparse.Namespace) -> int:
    """Run `baton chaos`; return the exit status."""
    for name in ("seeds", "requests"):
        if getattr(args, name) < 1:
            raise InvalidArgumentError(f"--{name} {getattr(args, name)} is out of range: use at least 1")
    for name in ("blows", "hung", "slow"):
        if getattr(args, name) < 0:
            raise InvalidArgumentError(f"--{name} {getattr(args, name)} is out of range: use 0 or more")
    if args.hung + args.slow > NUM_ENGINES:
        raise InvalidArgumentError(
            f"--hung {args.hung} and --slow {args.slow} are more than the {NUM_ENGINES} engines: use fewer"
        )
    for each in args.set:
        name = each.partition("=")[0].strip()
        section, _, field = name.partition(".")
        if (section not in _SECTIONS and name != "prefill.device") or field in _FIXED:
            raise InvalidArgumentError(
                f"--set {each!r} cannot be set here: use fields of generate, but not {', '.join(_FIXED)},"
                " those of device, or prefill.device"
            )
    # Imported late because it imports torch: --help and invalid options are answered at once.
    from baton_lab.chaos.session import run_session

    return run_session(args)
