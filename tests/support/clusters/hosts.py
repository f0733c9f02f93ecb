"""Several hosts on one machine: network namespaces on a bridge, each with an address, an interface and a /dev/shm.

Where namespaces may not be made, hosts are addresses of the loopback interface: the same processes under the same
addresses, but links cannot be cut and memory is shared.
"""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_SUBNET = "10.213.{network}.{host}"
_OUTSIDE = 254


@dataclass(frozen=True)
class Host:
    """A host that processes can be run on."""

    address: str
    namespace: str
    """Name of its network namespace; empty: the machine's own."""
    link: str
    """Name of its interface's end at the bridge; empty without a namespace."""

    def command(self, *arguments: str) -> list[str]:
        """The command line that runs these arguments on this host, with a /dev/shm of its own."""
        if not self.namespace:
            return [*arguments]
        own_memory = 'mount -t tmpfs tmpfs /dev/shm && exec "$@"'
        return ["ip", "netns", "exec", self.namespace, "sh", "-c", own_memory, "sh", *arguments]

    @contextlib.contextmanager
    def unplugged(self) -> Iterator[None]:
        """Nothing comes from this host or to it."""
        _ip("link", "set", self.link, "down")
        try:
            yield
        finally:
            _ip("link", "set", self.link, "up")

    @contextlib.contextmanager
    def deaf_to(self, other: "Host") -> Iterator[None]:
        """Nothing that this host sends reaches the other; what the other sends still comes."""
        route = ("route", "add", "blackhole", f"{other.address}/32")
        _ip("-n", self.namespace, *route)
        try:
            yield
        finally:
            _ip("-n", self.namespace, "route", "del", *route[2:])


MACHINE = Host("127.0.0.1", "", "")
"""The machine itself."""


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
        yield [Host(f"127.0.0.{10 + number}", "", "") for number in range(num_hosts)]
        return
    network = os.getpid() % 250
    bridge = f"bt{os.getpid()}"
    made = [
        Host(_SUBNET.format(network=network, host=1 + number), f"baton-{os.getpid()}-{number}", f"{bridge}n{number}")
        for number in range(num_hosts)
    ]
    try:
        _ip("link", "add", bridge, "type", "bridge")
        _ip("addr", "add", f"{_SUBNET.format(network=network, host=_OUTSIDE)}/24", "dev", bridge)
        _ip("link", "set", bridge, "up")
        for host in made:
            _plug(host, bridge, _SUBNET.format(network=network, host=_OUTSIDE))
        yield made
    finally:
        for host in made:
            subprocess.run(["ip", "netns", "del", host.namespace], capture_output=True, check=False)
        subprocess.run(["ip", "link", "del", bridge], capture_output=True, check=False)


def _plug(host: Host, bridge: str, outside: str) -> None:
    _ip("netns", "add", host.namespace)
    _ip("link", "add", host.link, "type", "veth", "peer", "name", "eth0", "netns", host.namespace)
    _ip("link", "set", host.link, "master", bridge, "up")
    _ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", "eth0")
    for interface in ("eth0", "lo"):
        _ip("-n", host.namespace, "link", "set", interface, "up")
    _ip("-n", host.namespace, "route", "add", "default", "via", outside)  # by it, processes find their own address


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr}"
