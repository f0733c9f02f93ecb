"""Several hosts on one machine: network namespaces on a bridge, each with an address, an interface, processes and a
/dev/shm of its own.

Where namespaces may not be made, hosts are addresses of the loopback interface: the same processes under the same
addresses, but links cannot be cut, and memory is shared.
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
"""Numbers of the networks that this process has made: the kernel takes a while to forget the names of one."""


@dataclass(frozen=True)
class Host:
    """A host that processes can be run on."""

    address: str
    namespace: str = ""
    """Name of its network namespace; empty: the machine's own."""
    link: str = ""
    """Name of its interface's end at the bridge; empty without a namespace."""
    init_pid: int = 0
    """The first process of the host; 0 without a namespace."""

    def command(self, *arguments: str) -> list[str]:
        """The command line that runs these arguments on this host, in the folder that it is called in."""
        if not self.namespace:
            return [*arguments]
        return ["nsenter", f"--target={self.init_pid}", "--net", "--mount", "--pid", "--wd=.", *arguments]

    def inner(self, pid: int) -> int:
        """The process that runs what `command` names, given the process of that command line, which passes no signal
        on."""
        if not self.namespace:
            return pid
        children = (Path("/proc") / str(pid) / "task" / str(pid) / "children").read_text().split()
        return int(children[0]) if children else pid

    def run(self, *arguments: str) -> None:
        """A command on this host, which must succeed."""
        subprocess.run(self.command(*arguments), check=True)

    @contextlib.contextmanager
    def unplugged(self) -> Iterator[None]:
        """Nothing comes from this host or to it."""
        _ip("link", "set", self.link, "down")
        try:
            yield
        finally:
            _ip("link", "set", self.link, "up")

    @contextlib.contextmanager
    def mute_to(self, other: "Host") -> Iterator[None]:
        """Nothing that this host sends reaches the other; what the other sends still comes."""
        route = ("route", "add", "blackhole", f"{other.address}/32")
        _ip("-n", self.namespace, *route)
        try:
            yield
        finally:
            _ip("-n", self.namespace, "route", "del", *route[2:])


MACHINE = Host("127.0.0.1")
"""The machine itself."""
_INIT = "mount -t tmpfs tmpfs /dev/shm && echo ready && exec tail -f /dev/null"


def can_make_hosts() -> bool:
    """Whether network namespaces may be made here."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    name = f"baton-try-{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode:
        return False
    _ip("netns", "del", name)
    return True


@contextlib.contextmanager
def hosts(num_hosts: int) -> Iterator[Sequence[Host]]:
    """So many hosts that reach each other, and that this process reaches; gone at the end."""
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
    """One host, at the bridge; all its processes are gone at the end."""
    _ip("netns", "add", namespace)
    try:
        _ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", namespace)
        _ip("link", "set", link, "master", bridge, "up")
        _ip("-n", namespace, "addr", "add", f"{address}/24", "dev", "eth0")
        for interface in ("eth0", "lo"):
            _ip("-n", namespace, "link", "set", interface, "up")
        _ip("-n", namespace, "route", "add", "default", "via", outside)  # by it, processes find their own address
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
