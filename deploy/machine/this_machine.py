"""Properties of this machine: its cores, its memory, and measurements that are made before its first use. Functions
that measure show their progress and block."""

import logging
import os
import shutil
import subprocess
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from rich.console import Console

from baton.modeling.kernels import native
from baton.modeling.kernels.kept_choice import load_choice
from baton.types import KernelChoice
from deploy.machine.device_profile import DTYPE_BYTES, must_measure

logger = logging.getLogger(__name__)

_QUERY_S = 10.0
"""Timeout in seconds of a query to the NVIDIA driver."""


@dataclass(frozen=True)
class Machine:
    """The properties of a machine on which a cluster is planned."""

    cores: frozenset[int]
    """Cores that this process may use."""
    available_bytes: int
    """Bytes of available memory."""
    shm_bytes: int
    """Bytes that are free in /dev/shm."""
    instruction_set: str | None
    """Best instruction set that this processor supports and for which native kernels are built. None: no such set
    exists."""
    kernels: tuple[KernelChoice, ...] = ()
    """Fastest kernels, as measured on this machine's kind of processor. If empty, each worker chooses its own
    kernels."""


def prepare_machine(console: Console) -> Machine:
    """Find the fastest kernels, and measure the rates of one core. A measurement that was made before on this kind of
    processor is not repeated. Return the properties of this machine."""
    kernels = prepare_kernels(console)
    _prepare_rates(console)
    return replace(inspect_machine(), kernels=kernels)


def inspect_machine() -> Machine:
    """Return the properties of this machine that need no measurement. The kernels are left empty."""
    pages = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    shm = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else 0
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    return Machine(frozenset(cores), _available_bytes() or pages, shm, native.chosen_set())


@cache
def gpu_name() -> str:
    """Return the name of this machine's first GPU, as the NVIDIA driver reports it. Return an empty string if the
    machine has no GPU or no driver. Blocks for some milliseconds at the first call."""
    if not (program := shutil.which("nvidia-smi")):
        return ""
    command = [program, "--query-gpu=name", "--format=csv,noheader", "--id=0"]
    try:
        run = subprocess.run(command, check=True, capture_output=True, text=True, timeout=_QUERY_S)
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning("nvidia-smi failed, so rates of a GPU are assumed; check the driver: %s", error)
        return ""
    return run.stdout.strip()


def prepare_kernels(console: Console) -> tuple[KernelChoice, ...]:
    """Return the fastest CPU kernels for this kind of processor, which are measured now unless they were measured
    before. An empty tuple means that no choice was made; each worker then chooses its own kernels. The measurement runs
    in a separate process, because a launcher does not import torch."""
    if native.may_need_measuring():
        with _doing("measuring the kernels on this processor", console):
            if reason := _failure_of("baton.modeling.kernels"):
                console.print(f"kernels cannot be measured ({reason}): workers measure them as they start")
    choice = load_choice()
    return () if choice is None else (choice,)


def _prepare_rates(console: Console) -> None:
    """Measure the rates of one core, the basis of the first predictions, unless they were measured before. Runs in a
    separate process. Must be called after `prepare_kernels`, because the chosen kernels are measured."""
    if any(must_measure("cpu", dtype_bytes) for dtype_bytes in DTYPE_BYTES.values()):
        with _doing("measuring what a core of this processor reaches", console):
            if reason := _failure_of("deploy.machine.device_profile"):
                console.print(f"rates cannot be measured ({reason}): predictions begin with assumed ones")


def _doing(text: str, console: Console) -> AbstractContextManager[object]:
    """Show `text` while the `with` block runs: on a terminal with a spinner, elsewhere as a line."""
    if console.is_terminal:
        return console.status(text)
    console.print(text, markup=False, soft_wrap=True)
    return nullcontext()


def _failure_of(module: str) -> str:
    """Run a module as a program. Return the last line of its error output if it failed, or an empty string if it
    succeeded."""
    command = [sys.executable, "-m", module]
    run = subprocess.run(command, check=False, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    return (run.stderr.strip().splitlines() or ["no message"])[-1] if run.returncode else ""


def _available_bytes() -> int:
    """Return MemAvailable in bytes, which includes memory that caches would release; 0 if /proc does not exist."""
    path = Path("/proc/meminfo")
    lines = path.read_text().splitlines() if path.is_file() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), 0)
