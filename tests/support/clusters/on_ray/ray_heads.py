"""Existing Ray instances that clusters join, for tests. Ray's own command starts an instance, and a separate process
queries its state."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import ray

from deploy.commands.ray_access import is_loopback, prepare_to_join
from deploy.commands.record import kill_ray
from tests.support.clusters.on_ray.hosts import MACHINE, Host
from tests.support.clusters.on_ray.ray_clusters import NO_VARIABLES, until

START_S = 200.0
NAMESPACE = "tests"
_OPTIONS = ("start", "--block", "--object-store-memory=80000000")
_HEAD_OPTIONS = ("--head", "--include-dashboard=false")
_JOINED = "Ray runtime started"
_LOOK = """
import json, sys, ray
ray.init(sys.argv[1], configure_logging=False, log_to_driver=False)
actors = ray.util.list_named_actors(all_namespaces=True)
places = [each["name"] for each in ray.util.placement_group_table().values() if each["state"] != "REMOVED"]
pools = [
    {name: amount for name, amount in each.items() if name.startswith("baton")}
    for each in (ray.available_resources(), ray.cluster_resources())
]
nodes = [each["NodeID"] for each in ray.nodes() if each["Alive"]]
print(json.dumps({"actors": actors, "places": places, "is_free": pools[0] == pools[1], "nodes": nodes}))
"""


@dataclass(frozen=True)
class RayHead:
    """A running Ray instance."""

    process: "subprocess.Popen[bytes]"
    address: str
    """Address (host:port) at which nodes and clusters join the instance."""
    num_nodes: int = 1
    """Number of nodes when the instance was passed to the test."""

    def is_empty(self) -> bool:
        """Return True if all its nodes are alive, no named actor and no placement group exists, and all resources of
        the pools are free."""
        assert self.process.poll() is None, "that Ray has ended"
        held = held_of(self.address)
        return len(held["nodes"]) == self.num_nodes and not held["actors"] and not held["places"] and held["is_free"]


def held_of(address: str, token: Path | None = None) -> dict[str, Any]:
    """Return what the Ray instance at `address` (host:port) holds: named actors, names of placement groups ("places"),
    whether all resources of the pools are free, and ids of its live nodes. `token`: file with the instance's token;
    None: no token is needed."""
    command = [sys.executable, "-c", _LOOK, address]
    variables = os.environ | environment(token)
    if is_loopback(address.rpartition(":")[0]):
        variables["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # else Ray uses another address
    told = subprocess.run(command, env=variables, text=True, capture_output=True, timeout=60, check=True)
    (line,) = [line for line in told.stdout.splitlines() if line.startswith('{"actors"')]  # among workers' logs
    held: dict[str, Any] = json.loads(line)
    return held


def environment(token: Path | None = None) -> dict[str, str]:
    """Return Ray's environment variables for an instance that requires the token in this file; None: no token."""
    auth = {"RAY_AUTH_MODE": "disabled"} if token is None else {"RAY_AUTH_MODE": "token"}
    return {**auth, "RAY_USAGE_STATS_ENABLED": "0"} | ({"RAY_AUTH_TOKEN_PATH": str(token)} if token else {})


@contextlib.contextmanager
def driver_of(head: RayHead) -> Iterator[None]:
    """Connect this process to the Ray instance as a driver, in the namespace `NAMESPACE`."""
    with mock.patch.dict(os.environ, environment()):
        prepare_to_join(head.address)
        ray.init(head.address, namespace=NAMESPACE, configure_logging=False, log_to_driver=False)
        try:
            yield
        finally:
            ray.shutdown()


@contextlib.contextmanager
def ray_head(
    pools: dict[str, int],
    num_cpus: int = 2,
    host: Host = MACHINE,
    *,
    port: int = 0,
    options: Sequence[str] = (),
    variables: Mapping[str, str] = NO_VARIABLES,
) -> Iterator[RayHead]:
    """Run a Ray instance of one node on `host`. The node declares the resources `pools`. The instance requires no
    token. `options` and `variables` add command-line options and environment variables. At the end, the instance and
    all nodes that joined it are stopped."""
    folder = tempfile.mkdtemp(prefix="baton-head-")
    places = [f"--port={port or free_port()}", f"--ray-client-server-port={free_port()}", f"--temp-dir={folder}"]
    output = Path(folder) / "output.txt"
    command = (*_HEAD_OPTIONS, *places, f"--num-cpus={num_cpus}", *options)
    process = _start(host, pools, output, {**environment(), **variables}, *command)
    try:
        until(lambda: _address(output) is not None or process.poll() is not None, START_S)
        address = _address(output)
        assert address is not None, f"Ray did not start: {output.read_text()}"
        yield RayHead(process, address)
    finally:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
        kill_ray(folder)
        process.wait()
        shutil.rmtree(folder)


@contextlib.contextmanager
def ray_node(
    head: RayHead, pools: dict[str, int], host: Host = MACHINE, label: str = ""
) -> Iterator["subprocess.Popen[bytes]"]:
    """Add a node on `host` to a Ray instance, and yield the node's process. The node declares the resources `pools` and
    a label (key=value). It also ends when `head` ends."""
    with tempfile.TemporaryDirectory(prefix="baton-node-") as folder:
        output = Path(folder) / "output.txt"
        labels = [f"--labels={label}"] if label else []
        process = _start(host, pools, output, environment(), f"--address={head.address}", "--num-cpus=2", *labels)
        try:
            until(lambda: _JOINED in output.read_text() or process.poll() is not None, START_S)
            assert process.poll() is None, f"the node did not start: {output.read_text()}"
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            if process.poll() is None:
                process.kill()
                process.wait()


def _start(
    host: Host, pools: dict[str, int], output: Path, variables: Mapping[str, str], *options: str
) -> "subprocess.Popen[bytes]":
    program = Path(sys.executable).with_name("ray")
    address = [f"--node-ip-address={host.address}"] if host is not MACHINE else []
    command = host.command(str(program), *_OPTIONS, *options, *address, f"--resources={json.dumps(pools)}")
    with output.open("w") as file:
        return subprocess.Popen(
            command,
            env={**os.environ, **variables},
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def free_port() -> int:
    """Return a port of the loopback interface that is free at the time of the call."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _address(output: Path) -> str | None:
    """Return the address to join, read from the output of Ray's command; None if the command has not printed it yet."""
    found = re.search(r"ray start --address='(.+)'", output.read_text())
    return found[1] if found else None
