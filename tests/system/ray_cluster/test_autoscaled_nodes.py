"""Nodes provided by Ray's own autoscaler. It starts a node for a group that waits for room, and removes a node after
its groups have ended. A cluster that scales itself by load causes nodes to start and end."""

import os
import signal
from pathlib import Path

import pytest

from baton import Client
from baton.sampling_params import SamplingParams
from tests.support.clusters.on_ray.autoscaled_rays import nodes_by_type
from tests.support.clusters.on_ray.ray_clusters import Streams, check_answer, endpoints, listener, until, until_settled
from tests.support.clusters.on_ray.topologies import GrownCluster
from tests.support.engines.generation import prompt

pytestmark = [pytest.mark.cluster, pytest.mark.ci]

PARAMS = SamplingParams(max_tokens=16, ignore_eos=True)
LOAD = SamplingParams(max_tokens=40, ignore_eos=True)


def test_a_cluster_that_starts_on_a_bare_head_gets_a_node_for_each_pool(grown: GrownCluster) -> None:
    for name, role in (("prefill-0", "prefill"), ("generate-0", "generate")):
        wanted = (
            f"{name} waits up to 120 s for a node with room for it (1 worker, each baton_{role} 1, CPU 0.01, memory "
        )
        assert wanted in grown.running.stderr
    assert nodes_by_type(grown.ray) == {"prefill": 1, "generate": 1}
    _ask(grown)


def test_load_makes_a_node_appear_for_the_pool_that_needs_it_and_leave_after_it(grown: GrownCluster) -> None:
    with Client(grown.running.target) as client:
        with Streams(grown.running, client, 8, LOAD) as streams:
            until(lambda: _num_ready(client, "generate") > 1, 120)
            assert nodes_by_type(grown.ray)["generate"] > 1
            scaling = client.cluster_state().scaling
            assert scaling is not None and scaling.mode == "act"
            assert any("start generate x1" in change.explanation for change in scaling.changes)
            streams.check()
        until(lambda: (_num_ready(client, "prefill"), _num_ready(client, "generate")) == (1, 1), 90)
        until_settled(grown.running, client)
        shown = grown.running.command("status").stdout
        assert "autoscaling (act): 1:1" in shown and "drain generate x1" in shown, shown
        until(lambda: nodes_by_type(grown.ray) == {"prefill": 1, "generate": 1})


def test_a_group_whose_node_is_lost_gets_another(grown: GrownCluster) -> None:
    with Client(grown.running.target) as client:
        (former,) = endpoints(client.cluster_state(), "generate")
        os.kill(_parent_of(listener(former)), signal.SIGKILL)  # the node's raylet
        until(lambda: not all(group.is_ready for group in client.cluster_state().groups))
        until_settled(grown.running, client, within_s=200)  # tries to start it come after ever longer pauses
        assert endpoints(client.cluster_state(), "generate") != (former,)
    _ask(grown)


def _num_ready(client: Client, role: str) -> int:
    return sum(group.is_ready for group in client.cluster_state().groups if group.role == role)


def _parent_of(pid: int) -> int:
    return int((Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])


def _ask(grown: GrownCluster) -> None:
    """An answer, which must be the model's."""
    with Client(grown.running.target) as client:
        answer = client.generate(token_ids=prompt(90), params=PARAMS).collect()
    check_answer(grown.running, prompt(90), answer, PARAMS)
