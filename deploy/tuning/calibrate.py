"""`baton calibrate`: measures the profile of this machine's device again, for longer than workers do."""

import argparse

from baton.errors import UnavailableError
from deploy.options import numbers as option_values
from deploy.options.subcommand import add_command

_DTYPES = ("bfloat16", "float32")
_DESCRIPTION = """\
Measures the rates of this machine's device: of matrix products, of attention, of reading memory and, on a GPU, of
launching kernels and of copies from the host. All predictions of a cluster begin with these rates, and are then
corrected by the durations of its jobs and steps. Rates of links between nodes are not measured.

Workers measure the rates of their node themselves if none are kept, in some seconds. This command measures for longer,
by default for a minute, and replaces what is kept. Clusters that start afterwards use the result. Run the command on
each node while the node is idle. It is refused while a cluster that was started on this machine runs. On a GPU that
several workers share by CUDA MPS, run it with the CUDA_MPS_ACTIVE_THREAD_PERCENTAGE of the workers.

Each dtype is measured in two halves. If they differ by more than 20 %, they are measured again, and if they differ
again, the rates that are kept stay as they are, and the exit status is 1."""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the `calibrate` command to the command line."""
    text = "measure the rates of this machine's device, with which predictions begin"
    parser = add_command(commands, run, "calibrate", text, _DESCRIPTION)
    text = "device to measure: cpu, cuda (the first GPU), or auto for cuda if there is a GPU, else cpu (default: auto)"
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", metavar="NAME", help=text)
    text = f"dtype to measure with: {', '.join(_DTYPES)} (default: all)"
    parser.add_argument("--dtype", choices=_DTYPES, metavar="NAME", help=text)
    text = "approximate time in seconds for each dtype (default: %(default)s)"
    parser.add_argument("--seconds", default="30", metavar="S", help=text)
    text = "measure even if a cluster runs on this machine, which distorts the rates"
    parser.add_argument("--anyway", action="store_true", help=text)


def run(args: argparse.Namespace) -> int:
    """Run `baton calibrate`; return the exit status: 1 if a measurement was not kept."""
    from rich.console import Console

    from baton.types import DTYPE_BYTES
    from deploy.commands.record import live_clusters
    from deploy.machine.device_profile import NUM_HALVES, gpu_here, keep_profiles, kept_profile
    from deploy.machine.this_machine import inspect_machine
    from deploy.options.screen import progress

    seconds = option_values.positive("--seconds", args.seconds)
    if (running := live_clusters()) and not args.anyway:
        raise UnavailableError(f"cluster {running[0]} runs on this machine: end it with `baton stop`, or add --anyway")
    machine = inspect_machine()
    device = ("cuda" if machine.gpus and machine.has_cuda else "cpu") if args.device == "auto" else args.device
    gpu = gpu_here() if device == "cuda" else ""
    dtypes = [args.dtype] if args.dtype else [*_DTYPES]
    before = {dtype: kept_profile(device, DTYPE_BYTES[dtype], gpu) for dtype in dtypes}
    with progress(Console(stderr=True), "measuring", NUM_HALVES * len(dtypes)) as done:
        kept = keep_profiles(device, dtypes, gpu, seconds=seconds, done=done)
    for dtype in dtypes:
        print(f"{dtype}: {kept_profile(device, DTYPE_BYTES[dtype], gpu) if dtype in kept else 'not kept'}")
        print(f"  before: {before[dtype] or 'nothing was kept'}")
    return 0 if len(kept) == len(dtypes) else 1
