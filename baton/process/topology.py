"""Topology of the machine's processors, as Linux reports it in sysfs: NUMA nodes, physical cores and hardware threads.

Each hardware thread is a CPU with an index, as in `os.sched_getaffinity`. The hardware threads of a core share its
arithmetic units. A NUMA node has its own memory, which its cores read faster than that of other nodes. If sysfs does
not exist, as on macOS, or lacks these files, as in some containers, the machine counts as one node, and each CPU as a
core. Functions read files, which takes some milliseconds on a large machine.
"""

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

SYSTEM = Path("/sys/devices/system")
"""Folder of sysfs with the folders `cpu` and `node`."""
_FEW_CPUS = 4
"""Number of CPUs up to which all hardware threads of a machine compute. With fewer threads, such a small machine would
be slower, because it has no cores to spare."""


@dataclass(frozen=True)
class NumaNode:
    """NUMA node, with the cores that a process may use."""

    number: int
    cores: tuple[tuple[int, ...], ...]
    """CPU indices of the hardware threads of each physical core, in ascending order."""
    free_bytes: int = 0
    """Bytes of the node's memory that processes can still allocate. Cached file pages count as free. 0: not known."""

    @property
    def cpus(self) -> frozenset[int]:
        """Indices of the node's CPUs that the process may use."""
        return frozenset(cpu for core in self.cores for cpu in core)


def usable_cpus() -> frozenset[int]:
    """Return the indices of the CPUs on which the operating system lets the calling thread run."""
    return frozenset(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1))


def read_nodes(cpus: Collection[int] | None = None, system: Path = SYSTEM) -> tuple[NumaNode, ...]:
    """Return the NUMA nodes that have any of the CPUs `cpus`, in ascending order, with only these CPUs. `cpus` None:
    all CPUs of the machine. `system`: folder of sysfs with the folders `cpu` and `node`."""
    folders = {int(path.name.removeprefix("node")): path for path in system.glob("node/node[0-9]*")}
    on_nodes = {number: _cpu_list(folder / "cpulist") for number, folder in folders.items()}
    every = {cpu for of_node in on_nodes.values() for cpu in of_node}
    usable = (every or usable_cpus()) if cpus is None else set(cpus)
    if not usable <= every:
        return (NumaNode(0, _cores(usable, system)),)
    nodes = (
        NumaNode(number, _cores(on_nodes[number] & usable, system), _free_bytes(folders[number] / "meminfo"))
        for number in sorted(on_nodes)
    )
    return tuple(node for node in nodes if node.cores)


def node_of(cpus: Collection[int], nodes: Sequence[NumaNode]) -> int | None:
    """Return the number of the node that has all of `cpus`. Return None if several nodes have them, or if the machine
    has only one node."""
    holders = [node.number for node in nodes if node.cpus & set(cpus)]
    return holders[0] if len(nodes) > 1 and len(holders) == 1 else None


def computing_cpus(nodes: Sequence[NumaNode]) -> list[tuple[int, ...]]:
    """Return the CPUs of each node that should compute: one hardware thread of each physical core. The other hardware
    threads are left to processes that do not compute. If the nodes have at most four CPUs, all of them are returned."""
    if sum(len(node.cpus) for node in nodes) <= _FEW_CPUS:
        return [tuple(sorted(node.cpus)) for node in nodes]
    return [tuple(core[0] for core in node.cores) for node in nodes]


def _cores(cpus: Collection[int], system: Path) -> tuple[tuple[int, ...], ...]:
    """Return the cores to which `cpus` belong, each as its hardware threads among `cpus`."""
    siblings = (_cpu_list(system / f"cpu/cpu{cpu}/topology/thread_siblings_list") | {cpu} for cpu in cpus)
    return tuple(sorted({tuple(sorted(core & set(cpus))) for core in siblings}))


def _cpu_list(path: Path) -> set[int]:
    """Return the indices in a file of sysfs such as "0-3,8"; none if the file does not exist."""
    found = set[int]()
    for part in path.read_text().strip().split(",") if path.is_file() else []:
        if part:
            first, _, last = part.partition("-")
            found |= set(range(int(first), int(last or first) + 1))
    return found


def _free_bytes(meminfo: Path) -> int:
    """Return the free bytes of a node's memory, including cached file pages; 0 if the file does not exist."""
    lines = [line.split() for line in meminfo.read_text().splitlines()] if meminfo.is_file() else []
    fields = {line[2].rstrip(":"): int(line[3]) for line in lines}  # such as: Node 0 MemFree: 1024 kB
    return 1024 * sum(fields.get(name, 0) for name in ("MemFree", "Active(file)", "Inactive(file)"))
