"""Gateways of clusters on Ray, started by the command that operators type."""

import contextlib
import re
import signal
import subprocess
import sys
from collections.abc import Iterator

from tests.support.clusters.on_ray.hosts import Host
from tests.support.clusters.on_ray.ray_clusters import ServedCluster, share_measurements, until
from tests.support.folders import ROOT

GATEWAY_OUTPUT = "gateway.txt"
"""Name of the file with the gateway's output, in the cluster's cache folder."""
START_S = 120.0


@contextlib.contextmanager
def gateway_on(host: Host, running: ServedCluster, *where: str) -> Iterator[str]:
    """Run a gateway on `host`, and yield its address. The host does not need to be a Ray node. `where`: command-line
    options by which the gateway finds the cluster."""
    output = running.cache / GATEWAY_OUTPUT
    arguments = (*where, "--host", host.address, "--port", "0", "--model", str(running.model), "--grace", "0")
    command = host.command(sys.executable, "-m", "deploy.cli", "gateway", *arguments)
    share_measurements(running.cache)
    with output.open("w") as file:
        process = subprocess.Popen(command, cwd=ROOT, stderr=file, start_new_session=True)
    try:
        until(lambda: process.poll() is not None or "serving on" in output.read_text(), START_S)
        found = re.search(r"serving on (\S+)", output.read_text())
        assert found, output.read_text()
        yield found[1]
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(20)
