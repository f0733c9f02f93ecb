"""Listening sockets of processes on this machine, read from the kernel's tables in /proc."""

import contextlib
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

from deploy.commands.record import process_start

_LISTEN = "0A"


@dataclass(frozen=True)
class Listener:
    """A listening TCP socket of one process."""

    pid: int
    command: str
    address: IPv4Address | IPv6Address
    port: int

    @property
    def is_local(self) -> bool:
        """Return True if only processes of this machine can connect to the socket."""
        mapped = self.address.ipv4_mapped if isinstance(self.address, IPv6Address) else None
        return (mapped or self.address).is_loopback


def descendants(pid: int) -> set[int]:
    """Return the id of the process and the ids of all its descendants."""
    parents = {int(path.name): _parent(path) for path in Path("/proc").glob("[0-9]*")}
    found = {pid}
    while more := {each for each, parent in parents.items() if parent in found} - found:
        found |= more
    return {each for each in found if process_start(each)}


def listeners(pids: set[int]) -> list[Listener]:
    """Return all listening sockets of the given processes."""
    sockets = dict(_listening())
    found = []
    for pid in pids:
        process = Path("/proc") / str(pid)
        with contextlib.suppress(OSError):  # the process has ended
            command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            links = {_target(file) for file in (process / "fd").iterdir()}
            found += [Listener(pid, command, *sockets[link]) for link in links & sockets.keys()]
    return found


def _target(file: Path) -> str:
    with contextlib.suppress(OSError):  # the file descriptor was closed meanwhile
        return str(file.readlink())
    return ""


def _listening() -> Iterator[tuple[str, tuple[IPv4Address | IPv6Address, int]]]:
    for family, table in ((socket.AF_INET, "/proc/net/tcp"), (socket.AF_INET6, "/proc/net/tcp6")):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTEN:
                host, _, port = fields[1].partition(":")
                words = [bytes.fromhex(host[at : at + 8])[::-1] for at in range(0, len(host), 8)]  # little-endian
                address = ip_address(socket.inet_ntop(family, b"".join(words)))
                yield f"socket:[{fields[9]}]", (address, int(port, 16))


def _parent(process: Path) -> int:
    with contextlib.suppress(OSError):
        return int((process / "stat").read_text().rpartition(")")[2].split()[1])
    return 0
