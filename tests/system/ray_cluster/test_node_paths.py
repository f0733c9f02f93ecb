"""Nodes on which files do not exist that the launcher names by its own paths. They find copies, get the files through
Ray, or refuse with an error that names the file."""

from pathlib import Path

import pytest

from baton import Client
from baton.sampling_params import SamplingParams
from tests.support.clusters.on_ray.ray_clusters import check_answer, launched
from tests.support.clusters.on_ray.topologies import FAR, HostsCluster, draft_settings
from tests.support.engines.generation import prompt

pytestmark = [pytest.mark.cluster, pytest.mark.ci]


@pytest.fixture
def apart(over_hosts: HostsCluster) -> HostsCluster:
    """Hosts of which the second lacks the launcher's folder."""
    if not over_hosts.second.namespace:
        pytest.skip("addresses of the loopback interface share all folders")
    return over_hosts


def test_a_node_finds_a_copy_of_the_draft_model(apart: HostsCluster) -> None:
    params = SamplingParams(max_tokens=16, ignore_eos=True, num_drafts=2)
    with Client(apart.running.target) as client:
        groups = client.cluster_state().groups
        (near,) = (each.name for each in groups if each.role == "generate" and apart.first.address in each.endpoints[0])
        assert apart.running.command("drain", near, "--keep").returncode == 0
        answer = client.generate(token_ids=prompt(60), params=params).collect()
        assert apart.running.command("drain", near, "--undo").returncode == 0
    check_answer(apart.running, prompt(60), answer, params)
    assert answer.timings is not None and answer.timings.speculation is not None
    assert [each.source for each in answer.timings.speculation.sources] == ["model"]


def test_a_node_without_the_draft_model_refuses_and_says_which(apart: HostsCluster, tmp_path: Path) -> None:
    settings = ("name=other", "prefill.num_groups=0", f'generate.node_labels=["{FAR}"]', *draft_settings(apart.hidden))
    host = f"orchestrator.host={apart.first.address}"
    with launched(
        tmp_path, apart.running.model, host, *settings, address=apart.ray.address, host=apart.first
    ) as starting:
        assert starting.process.wait(90) == 1
    assert starting.stderr.splitlines()[-1] == (
        f"baton: generate-0: on node {apart.second.address}: generate.draft_model = {apart.hidden / 'drafts'} is "
        "missing, and model.search is empty: put a copy of that name there"
    )
