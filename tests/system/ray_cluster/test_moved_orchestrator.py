"""The host of launcher, supervisor and orchestrator is lost: Ray gives the latter two another place, and gateways find
them there."""

import contextlib
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from baton import Client, Reconnect
from baton.sampling_params import SamplingParams
from modeling.checkpoints.weights import load_decoder
from tests.support.clusters.hosts import Host, can_make_hosts, hosts
from tests.support.clusters.ray_clusters import ServedCluster, run_baton, served, share_measurements, until
from tests.support.clusters.ray_heads import RayHead, held_of, ray_head, ray_node
from tests.support.folders import ROOT
from tests.support.models.reference import check_equal_tokens
from tests.support.models.texts import passage_ids

pytestmark = [pytest.mark.cluster, pytest.mark.ci]

PARAMS = SamplingParams(max_tokens=160, ignore_eos=True)
GATEWAY_OUTPUT = "gateway.txt"
START_S = 40.0
PATIENT = Reconnect(num_resumes=60)
SOON_LOST = {"RAY_health_check_period_ms": "1000", "RAY_health_check_timeout_ms": "2000"}
"""By default Ray takes a minute to find that a host is gone which has not closed its connections."""


@dataclass(frozen=True)
class Doomed:
    """A cluster whose launcher's host, with an engine, will be lost, and a gateway on another one."""

    running: ServedCluster
    ray: RayHead
    head: Host
    launcher: Host
    gateway: str
    """host:port."""


@pytest.fixture(scope="module")
def doomed(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Doomed]:
    if not can_make_hosts():
        pytest.skip("links of loopback addresses cannot be cut")
    cache = tmp_path_factory.mktemp("doomed")
    with ExitStack() as stack:
        head, launcher, workers, outside = stack.enter_context(hosts(4))
        ray = stack.enter_context(ray_head({}, host=head, variables=SOON_LOST))
        for host, pools in ((launcher, {"baton_generate": 1}), (workers, {"baton_prefill": 1, "baton_generate": 1})):
            stack.enter_context(ray_node(ray, pools, host))
        settings = ("prefill.num_ranks=1", "generate.num_groups=2", f"orchestrator.host={launcher.address}")
        running = stack.enter_context(served(cache, smollm2, *settings, address=ray.address, host=launcher))
        gateway = stack.enter_context(gateway_on(outside, ray, cache, smollm2))
        yield Doomed(running, ray, head, launcher, gateway)


def test_a_stream_through_a_gateway_survives_the_loss_of_the_orchestrator_s_host(doomed: Doomed, smollm2: Path) -> None:
    prompt, tokens = passage_ids(smollm2, 120), []
    with ExitStack() as lost, Client(doomed.gateway, reconnect=PATIENT) as client:
        for event in client.generate(token_ids=prompt, params=PARAMS):
            if event.token is None:
                continue
            tokens.append(event.token.token_id)
            if len(tokens) == 10:
                lost.enter_context(doomed.launcher.unplugged())
        check_equal_tokens(load_decoder(smollm2), prompt, tokens, PARAMS)
        again = client.generate(token_ids=prompt, params=PARAMS).collect()
        assert [token.token_id for token in again.tokens] == tokens
    moved = re.search(r"has moved from (\S+) to (\S+):", (doomed.running.cache / GATEWAY_OUTPUT).read_text())
    assert moved and moved[1] == doomed.running.target and moved[2] != doomed.launcher.address


def test_what_outlives_its_launcher_s_machine_is_ended_from_another(doomed: Doomed, tmp_path: Path) -> None:
    assert held_of(doomed.ray.address)["actors"]
    for text in ("stopped", "not running"):
        stopped = run_baton(tmp_path, "stop", "--address", doomed.ray.address, host=doomed.head)
        assert stopped.stdout == f"cluster baton: {text} on Ray at {doomed.ray.address}\n"
    until(lambda: not held_of(doomed.ray.address)["actors"] and not held_of(doomed.ray.address)["places"])


@contextlib.contextmanager
def gateway_on(host: Host, ray: RayHead, cache: Path, model: Path) -> Iterator[str]:
    """The address of a gateway on that host, which is no node of the Ray that it finds the orchestrator by."""
    output = cache / GATEWAY_OUTPUT
    arguments = ("--address", ray.address, "--host", host.address, "--port", "0", "--model", str(model))
    command = host.command(sys.executable, "-m", "deploy.cli", "gateway", *arguments, "--grace", "0")
    share_measurements(cache)
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
