"""A cluster on Ray that scales itself, with the standard model: a group comes with more streams than slots, and leaves
after them; no stream is lost or cut."""

from pathlib import Path

import pytest

from baton import Client
from tests.support.clusters.ray_clusters import Streams, processes_of, served, until, until_settled

SETTINGS = (
    *("prefill.num_ranks=1", "generate.num_slots=2", "supervision.heartbeat_s=0.5"),
    *("autoscaling.mode=act", "autoscaling.max=3", "autoscaling.cooldown_s=4", "autoscaling.cold_start_s=5"),
)


def _ready(client: Client) -> list[str]:
    return sorted(group.name for group in client.cluster_state().groups if group.is_ready)


@pytest.mark.ci
def test_a_group_comes_with_more_streams_and_leaves_after_them(smollm2: Path, tmp_path: Path) -> None:
    with served(tmp_path, smollm2, *SETTINGS) as cluster, Client(cluster.target) as client:
        with Streams(client, smollm2, num_prompts=8) as streams:
            until(lambda: _ready(client) == ["generate-0", "generate-1", "prefill-0"], 90)
            scaling = client.cluster_state().scaling
            assert scaling is not None and scaling.mode == "act"
            assert any("start generate x1" in change.explanation for change in scaling.changes)
            streams.check()
        until(lambda: _ready(client) in (["generate-0", "prefill-0"], ["generate-1", "prefill-0"]), 90)
        until_settled(cluster, client)
        shown = cluster.command("status")
        assert "autoscaling (act): 1:1" in shown.stdout and "drain generate x1" in shown.stdout, shown.stdout
        assert not client.cluster_state().why_degraded
    assert not processes_of(cluster.ray_folder)
