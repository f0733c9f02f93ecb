"""A cluster that scales itself on a Ray that provides nodes by itself, with the standard model: more streams than slots
bring a group and its node, which go after them; no stream is lost or cut."""

from pathlib import Path

import pytest

from baton import Client
from tests.support.clusters.autoscaled_rays import autoscaled_ray, nodes_by_type
from tests.support.clusters.ray_clusters import Streams, served, until, until_settled

pytestmark = pytest.mark.cluster

NODE_TYPES = {"prefill": {"baton_prefill": 1}, "generate": {"baton_generate": 1}}
SETTINGS = (
    *("prefill.num_ranks=1", "generate.num_slots=2", "supervision.heartbeat_s=0.5", "ray.node_wait_s=100"),
    *(f'{role}.node_labels=["baton-pool={role}"]' for role in NODE_TYPES),
    *("autoscaling.mode=act", "autoscaling.max=3", "autoscaling.cooldown_s=4", "autoscaling.cold_start_s=5"),
)


def _ready(client: Client) -> list[str]:
    return sorted(group.name for group in client.cluster_state().groups if group.is_ready)


@pytest.mark.ci
def test_load_makes_a_node_appear_for_the_pool_that_needs_it_and_leave_after_it(smollm2: Path, tmp_path: Path) -> None:
    with (
        autoscaled_ray(NODE_TYPES) as ray,
        served(tmp_path, smollm2, *SETTINGS, address=ray.address) as cluster,
        Client(cluster.target) as client,
    ):
        until(lambda: nodes_by_type(ray) == {"prefill": 1, "generate": 1})
        with Streams(client, smollm2, num_prompts=8) as streams:
            until(lambda: _ready(client) == ["generate-0", "generate-1", "prefill-0"], 120)
            assert nodes_by_type(ray) == {"prefill": 1, "generate": 2}
            scaling = client.cluster_state().scaling
            assert scaling is not None and scaling.mode == "act"
            assert any("start generate x1" in change.explanation for change in scaling.changes)
            streams.check()
        until(lambda: len(_ready(client)) == 2, 90)
        until_settled(cluster, client)
        shown = cluster.command("status").stdout
        assert "autoscaling (act): 1:1" in shown and "drain generate x1" in shown, shown
        until(lambda: not client.cluster_state().why_degraded)
        until(lambda: nodes_by_type(ray) == {"prefill": 1, "generate": 1})
