"""Simulated hosts on one machine. A host is a network namespace on a bridge, with its own address, network interface,
processes and /dev/shm.

Without permission to create network namespaces, a host is only an address of the loopback interface. Processes and
addresses are the same then, but links cannot be cut, and all hosts share /dev/shm.
"""

import contextlib
import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

_SUBNET = "10.213.{network}.{host}"
_OUTSIDE = 254
_NUMBERS = itertools.count()
"""Numbers for the names of networks. No number is used twice in a process, because the kernel keeps names for a while
after a network is removed."""


@dataclass(frozen=True)
class Host:
    """Simulated host on which processes can run."""

    address: str
    namespace: str = ""
    """Name of the host's network namespace. Empty: the machine's own namespace."""
    link: str = ""
    """Name of the host's network interface on the side of the bridge. Empty without a namespace."""
    init_pid: int = 0
    """Process id of the host's first process; 0 without a namespace."""

    def command(self, *arguments: str) -> list[str]:
        """Return the command line that runs `arguments` on this host, in the caller's working folder."""
        if not self.namespace:
            return [*arguments]
        return ["nsenter", f"--target={self.init_pid}", "--net", "--mount", "--pid", "--wd=.", *arguments]

    def inner(self, pid: int) -> int:
        """Return the id of the process that runs the arguments of `command`. `pid` is the process of the whole command
        line, which does not forward signals."""
        if not self.namespace:
            return pid
        children = (Path("/proc") / str(pid) / "task" / str(pid) / "children").read_text().split()
        return int(children[0]) if children else pid

    def run(self, *arguments: str) -> None:
        """Run a command on this host. Fails if the command fails."""
        subprocess.run(self.command(*arguments), check=True)

    @contextlib.contextmanager
    def unplugged(self) -> Iterator[None]:
        """Cut the host's link in both directions inside the context."""
        _ip("link", "set", self.link, "down")
        try:
            yield
        finally:
            _ip("link", "set", self.link, "up")

    @contextlib.contextmanager
    def mute_to(self, other: "Host") -> Iterator[None]:
        """Drop all packets from this host to `other` inside the context. Packets in the other direction still
        arrive."""
        route = ("route", "add", "blackhole", f"{other.address}/32")
        _ip("-n", self.namespace, *route)
        try:
            yield
        finally:
            _ip("-n", self.namespace, "route", "del", *route[2:])


MACHINE = Host("127.0.0.1")
"""The machine itself, as a host."""
_INIT = "mount -t tmpfs tmpfs /dev/shm && echo ready && exec tail -f /dev/null"


def can_make_hosts() -> bool:
    """Return whether this process is permitted to create network namespaces."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    name = f"baton-try-{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode:
        return False
    _ip("netns", "del", name)
    return True


@contextlib.contextmanager
def hosts(num_hosts: int) -> Iterator[Sequence[Host]]:
    """Create `num_hosts` hosts that can reach each other and this process. Remove all of them at the end."""
    if not can_make_hosts():
        yield [Host(f"127.0.0.{10 + number}") for number in range(num_hosts)]
        return
    number_of = f"{os.getpid()}{next(_NUMBERS)}"
    network = int(number_of) % 250
    bridge, outside = f"b{number_of}", _SUBNET.format(network=network, host=_OUTSIDE)
    with ExitStack() as stack:
        _ip("link", "add", bridge, "type", "bridge")
        stack.callback(_ip, "link", "del", bridge)
        _ip("addr", "add", f"{outside}/24", "dev", bridge)
        _ip("link", "set", bridge, "up")
        addresses = [_SUBNET.format(network=network, host=1 + number) for number in range(num_hosts)]
        yield [
            stack.enter_context(_host(address, f"baton-{number_of}-{number}", bridge, f"{bridge}n{number}", outside))
            for number, address in enumerate(addresses)
        ]


@contextlib.contextmanager
def _host(address: str, namespace: str, bridge: str, link: str, outside: str) -> Iterator[Host]:
    """Create one host at the bridge. At the end, end all its processes."""
    _ip("netns", "add", namespace)
    try:
        _ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", namespace)
        _ip("link", "set", link, "master", bridge, "up")
        _ip("-n", namespace, "addr", "add", f"{address}/24", "dev", "eth0")
        for interface in ("eth0", "lo"):
            _ip("-n", namespace, "link", "set", interface, "up")
        _ip("-n", namespace, "route", "add", "default", "via", outside)  # lets processes find their own address
        own = ("unshare", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child", "sh", "-c", _INIT)
        command = ["ip", "netns", "exec", namespace, *own]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
            try:
                assert process.stdout is not None
                assert process.stdout.readline() == "ready\n"
                init = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
                yield Host(address, namespace, link, int(init))
            finally:
                process.kill()
    finally:
        _ip("netns", "del", namespace)


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr}"
