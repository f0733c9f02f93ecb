"""Properties of this machine: its cores, its GPUs, its memory, and measurements that are made before its first use.
Functions that measure show their progress and block."""

import importlib.metadata
import logging
import math
import os
import runpy
import shutil
import subprocess
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from rich.console import Console

from baton.modeling.kernels import native
from baton.modeling.kernels.kept_choice import load_choice
from baton.process.cores import cpu_quota
from baton.process.memory import free_bytes
from baton.process.topology import NumaNode, computing_cpus, read_nodes, usable_cpus
from baton.types import KernelChoice
from deploy.config.environment import visible_gpus
from deploy.machine.device_profile import DTYPE_BYTES, failure_of, must_measure

logger = logging.getLogger(__name__)

_QUERY_S = 10.0
"""Timeout in seconds of a query to the NVIDIA driver."""
_QUERY = ("--query-gpu=index,name,memory.total,memory.used,uuid", "--format=csv,noheader,nounits")
_NUM_FIELDS = 5
_USED_SHARE = 0.05
"""Fraction of a GPU's memory above which it counts as in use by other processes. The driver itself uses less."""


@dataclass(frozen=True)
class GpuState:
    """A GPU of a machine, and the use of its memory when it was queried."""

    index: int
    """Index of the GPU in the output of nvidia-smi."""
    name: str
    total_bytes: int
    """Bytes of memory. 0: unknown, because the driver does not report it or because the GPU is a MIG instance."""
    free_bytes: int
    """Bytes of memory that neither processes nor the driver use."""
    uuid: str

    def __str__(self) -> str:
        used_bytes = self.total_bytes - self.free_bytes
        size = f"{self.total_bytes / 2**30:.1f} GiB" if self.total_bytes else "memory unknown"
        used = f", {used_bytes / 2**30:.1f} GiB in use by others" if used_bytes > _USED_SHARE * self.total_bytes else ""
        return f"GPU {self.index}: {self.name}, {size}{used}"


@dataclass(frozen=True)
class Machine:
    """The properties of a machine on which a cluster is planned."""

    nodes: tuple[NumaNode, ...]
    """NUMA nodes, with the cores that this process may use."""
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
    gpus: tuple[GpuState, ...] = ()
    """GPUs that this process may use. Empty if the machine has no GPU, or if nvidia-smi is not installed."""
    has_cuda: bool = True
    """True if the installed torch is built with CUDA."""
    cpu_quota: float = math.inf
    """Number of cores whose time the container of this process may use. Infinity: no limit."""

    @property
    def cpus(self) -> frozenset[int]:
        """Indices of the CPUs that this process may use. A core with SMT has several."""
        return frozenset[int]().union(*(node.cpus for node in self.nodes))

    @property
    def is_limited(self) -> bool:
        """True if the container of this process may use the time of fewer cores than the machine has."""
        return self.cpu_quota < sum(map(len, computing_cpus(self.nodes)))


def prepare_machine(console: Console) -> Machine:
    """Find the fastest kernels, and measure the rates of one core. A measurement that was made before on this kind of
    processor is not repeated. Return the properties of this machine."""
    kernels = prepare_kernels(console)  # before the rates, which are those of the chosen kernels
    is_missing = any(must_measure("cpu", dtype_bytes) for dtype_bytes in DTYPE_BYTES.values())
    text = "measuring what a core of this processor reaches"
    if is_missing and (reason := _measure("deploy.machine.device_profile", text, console)):
        console.print(f"rates cannot be measured ({reason}): predictions begin with assumed ones")
    return replace(inspect_machine(), kernels=kernels)


def inspect_machine() -> Machine:
    """Return the properties of this machine that need no measurement. The kernels are left empty."""
    pages = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    available = free_bytes() if Path("/proc/meminfo").is_file() else pages
    shm = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else 0
    nodes, kernels = read_nodes(usable_cpus()), native.chosen_set()
    return Machine(nodes, available, shm, kernels, gpus=find_gpus(), has_cuda=_has_cuda(), cpu_quota=cpu_quota())


def gpu_name() -> str:
    """Return the name of the first GPU that this process may use, as the NVIDIA driver reports it. If it may use none,
    return the name of the machine's first GPU, because Ray hides all GPUs from processes that compute on none. Return
    an empty string if the machine has no GPU or no driver. Blocks for some milliseconds at the first call."""
    return next((gpu.name for gpu in (*find_gpus(), *parse_gpus(gpu_report()))), "")


def find_gpus() -> tuple[GpuState, ...]:
    """Return the GPUs of this machine that CUDA_VISIBLE_DEVICES permits. The driver is queried only by the first call
    of a process, which blocks for some milliseconds."""
    return parse_gpus(gpu_report(), visible_gpus())


@cache
def gpu_report() -> str:
    """Return the output of nvidia-smi, which lists this machine's GPUs; empty if the program fails or is not
    installed."""
    if not (program := shutil.which("nvidia-smi")):
        return ""
    try:
        run = subprocess.run([program, *_QUERY], check=True, capture_output=True, text=True, timeout=_QUERY_S)
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning("nvidia-smi failed, so the GPUs of this machine are not used; check the driver: %s", error)
        return ""
    return run.stdout


def parse_gpus(report: str, visible: str | None = None) -> tuple[GpuState, ...]:
    """Return the GPUs that are listed in `report`, the output of nvidia-smi, and in `visible`, a value of
    CUDA_VISIBLE_DEVICES. `visible` None: all GPUs. As in CUDA, the order is that of `visible`, and entries after one
    that does not exist are ignored. nvidia-smi does not list MIG instances: an entry that names one is returned as a
    GPU with the name of the first GPU and unknown memory. Lines that do not describe a GPU are ignored."""
    lines = [[each.strip() for each in line.split(",")] for line in report.splitlines()]
    gpus = [_gpu(*fields) for fields in lines if len(fields) == _NUM_FIELDS and fields[0].isdigit()]
    if visible is None:
        return tuple(gpus)
    found = list[GpuState]()
    for entry in map(str.strip, visible.split(",")):
        named = [gpu for gpu in gpus if entry == str(gpu.index) or (entry and gpu.uuid.startswith(entry))]
        if gpus and entry.startswith("MIG-"):
            named = [replace(gpus[0], total_bytes=0, free_bytes=0, uuid=entry)]
        if len(named) != 1:
            break
        found += named
    return tuple(found)


def _gpu(index: str, name: str, total: str, used: str, uuid: str) -> GpuState:
    """Return the GPU that these fields of nvidia-smi describe. The sizes are in MiB, or are not numbers if the driver
    does not report them, for example [N/A]."""
    total_mib, used_mib = (int(total), int(used)) if total.isdigit() and used.isdigit() else (0, 0)
    return GpuState(int(index), name, total_mib * 2**20, (total_mib - used_mib) * 2**20, uuid)


def _has_cuda() -> bool:
    """Return whether the installed torch is built with CUDA. Its version file is read, because importing torch takes
    seconds."""
    path = importlib.metadata.distribution("torch").locate_file("torch/version.py")
    return runpy.run_path(str(path)).get("cuda") is not None


def prepare_kernels(console: Console) -> tuple[KernelChoice, ...]:
    """Return the fastest CPU kernels for this kind of processor, which are measured now unless they were measured
    before. An empty tuple means that no choice was made; each worker then chooses its own kernels. The measurement runs
    in a separate process, because a launcher does not import torch."""
    text = "measuring the kernels on this processor"
    if native.may_need_measuring() and (reason := _measure("baton.modeling.kernels", text, console)):
        console.print(f"kernels cannot be measured ({reason}): workers measure them as they start")
    choice = load_choice()
    return () if choice is None else (choice,)


def _measure(module: str, text: str, console: Console) -> str:
    """Run a module that measures in a separate process. Return the reason if it failed, or an empty string. Meanwhile
    show `text`: on a terminal with a spinner, elsewhere as a line."""
    if console.is_terminal:
        with console.status(text):
            return failure_of(module)
    console.print(text, markup=False, soft_wrap=True)
    return failure_of(module)
