"""False folders of sysfs, which describe machines with any number of NUMA nodes, cores and hardware threads."""

from dataclasses import dataclass
from pathlib import Path

from baton.process.topology import NumaNode, read_nodes


@dataclass(frozen=True)
class Shape:
    """Shape of a machine. CPUs are numbered as Linux does: first one hardware thread of each core, then the others."""

    num_nodes: int
    cores_each: int
    threads_each: int = 1
    free_kib: int = 64 << 20
    """Free memory of each node."""

    @property
    def num_cores(self) -> int:
        return self.num_nodes * self.cores_each

    def siblings(self, core: int) -> list[int]:
        return [core + thread * self.num_cores for thread in range(self.threads_each)]

    def write(self, system: Path) -> Path:
        """Write the folders `cpu` and `node`, and return their folder."""
        for core in range(self.num_cores):
            for cpu in self.siblings(core):
                topology = system / f"cpu/cpu{cpu}/topology"
                topology.mkdir(parents=True)
                (topology / "thread_siblings_list").write_text(",".join(map(str, self.siblings(core))) + "\n")
        for node in range(self.num_nodes):
            first, folder = node * self.cores_each, system / f"node/node{node}"
            folder.mkdir(parents=True)
            starts = self.siblings(first)
            ranges = [f"{start}-{start + self.cores_each - 1}" for start in starts]
            (folder / "cpulist").write_text(",".join(ranges) + "\n")
            half = self.free_kib // 2
            sizes = {"MemTotal": 2 * self.free_kib, "MemFree": half, "Active(anon)": 7, "Inactive(file)": half}
            (folder / "meminfo").write_text("".join(f"Node {node} {key}: {size} kB\n" for key, size in sizes.items()))
        return system

    def nodes(self, system: Path) -> tuple[NumaNode, ...]:
        return read_nodes(range(self.num_cores * self.threads_each), self.write(system))


def flat_nodes(num_cores: int) -> tuple[NumaNode, ...]:
    """Return the only node of a machine without sysfs."""
    return read_nodes(range(num_cores), Path("/nowhere"))
