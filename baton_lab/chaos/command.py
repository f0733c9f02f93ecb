"""Command line of `baton chaos`, which runs chaos schedules (baton_lab.chaos.session) on child processes."""

import argparse
from pathlib import Path

from baton.errors import InvalidArgumentError
from baton.settings.paths import cache_folder
from baton_lab.chaos.schedule import NUM_ENGINES
from deploy.config.environment import DEFAULT_MODEL
from deploy.options.subcommand import add_command

_DESCRIPTION = """\
Tests the guarantees of a cluster while faults occur. Starts two prefill ranks, two generation engines and an
orchestrator as processes of this machine. A proxy in front of each process injects network faults.

A schedule is a list of requests and faults, which is determined by a seed. For each schedule, the command sends the
requests twice: first without faults, then with these faults:

  processes   a process, which may be the orchestrator, is killed or stopped (--blows)
  calls       a call is delayed, refused, repeated or cut off, or its answer is lost
  clients     a client cancels its request, or has set an early deadline
  hung        the thread of an engine is stopped, but its process still answers (--hung). Within two heartbeats plus
              the duration of four expected steps (at least 10 s), the engine must be killed, and then replaced
  slow        an engine gets a fifth of a core for half a minute (--slow). It must not be killed

Each request must end exactly once and in time, with the same tokens as without faults. Afterwards, no slot, memory or
request may still be held, and the counts of slots and bytes must be consistent. docs/chaos.md lists all conditions. The
exit status is 1 if a condition is violated."""

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
    text = "start a cluster, inject faults, and check that its guarantees hold"
    parser = add_command(commands, run, "chaos", text, _DESCRIPTION, examples=_EXAMPLES)
    which = parser.add_mutually_exclusive_group()
    text = "number of schedules; their seeds are 1 to N (default: 3)"
    which.add_argument("--seeds", type=int, default=3, metavar="N", help=text)
    which.add_argument("--seed", type=int, metavar="K", help="seed of a single schedule, instead of --seeds")
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
    text = "setting of the sections generate and device, or prefill.device; may be repeated; see `baton config`"
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.FIELD=VALUE", help=text)
    text = "model: name, Hugging Face folder, or GGUF file (default: %(default)s)"
    parser.add_argument("--model", default=DEFAULT_MODEL, help=text)
    text = "folder for converted models (default: %(default)s)"
    parser.add_argument("--cache", type=Path, default=cache_folder(), help=text)
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
