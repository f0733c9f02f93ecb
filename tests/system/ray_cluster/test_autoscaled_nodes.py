"""Ray's own autoscaler provides the nodes: a group that waits for room is the demand by which it starts one, and a node
that groups have left goes."""

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from baton import Client
from baton.sampling_params import SamplingParams
from modeling.checkpoints.weights import load_decoder
from tests.support.clusters.autoscaled_rays import autoscaled_ray, nodes_by_type
from tests.support.clusters.ray_clusters import ServedCluster, endpoints, listener, served, until, until_settled
from tests.support.clusters.ray_heads import RayHead
from tests.support.models.reference import check_equal_tokens
from tests.support.models.texts import passage_ids

pytestmark = [pytest.mark.cluster, pytest.mark.ci]

PARAMS = SamplingParams(max_tokens=16, ignore_eos=True)
NODE_TYPES = {"prefill": {"baton_prefill": 1}, "generate": {"baton_generate": 1}}
"""As `deploy/manifests/ray_cluster.yaml` has them, with room for one worker each."""


@dataclass(frozen=True)
class Grown:
    """A cluster on a Ray that had no nodes before."""

    running: ServedCluster
    ray: RayHead

    def command(self, *arguments: str) -> None:
        done = self.running.command(*arguments)
        assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def grown(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Grown]:
    labels = [f'{role}.node_labels=["baton-pool={role}"]' for role in NODE_TYPES]
    settings = ("prefill.num_ranks=1", "ray.node_wait_s=100", *labels)
    with (
        autoscaled_ray(NODE_TYPES) as ray,
        served(tmp_path_factory.mktemp("grown"), smollm2, *settings, address=ray.address) as running,
    ):
        yield Grown(running, ray)


def test_a_cluster_that_starts_on_a_bare_head_gets_a_node_for_each_pool(grown: Grown, smollm2: Path) -> None:
    for name, role in (("prefill-0", "prefill"), ("generate-0", "generate")):
        wanted = (
            f"{name} waits up to 120 s for a node with room for it (1 worker, each baton_{role} 1, CPU 0.01, memory "
        )
        assert wanted in grown.running.stderr
    assert nodes_by_type(grown.ray) == {"prefill": 1, "generate": 1}
    ask(grown, smollm2, 0)


@pytest.mark.parametrize("pool", ["generate", pytest.param("prefill", marks=pytest.mark.nightly)])
def test_a_pool_that_grows_gets_a_node_which_goes_when_it_shrinks(grown: Grown, smollm2: Path, pool: str) -> None:
    before = nodes_by_type(grown.ray)
    grown.command("scale", pool, "2")
    assert nodes_by_type(grown.ray) - before == {pool: 1}
    grown.command("drain", f"{pool}-0", "--keep")
    ask(grown, smollm2, 300)  # by the new group
    grown.command("drain", f"{pool}-0", "--undo")
    grown.command("scale", pool, "1")
    until(lambda: nodes_by_type(grown.ray) == before)
    ask(grown, smollm2, 600)
    with Client(grown.running.target) as client:
        until_settled(grown.running, client)
        assert [group.name for group in client.cluster_state().groups if group.role == pool] == [f"{pool}-0"]


def test_a_group_whose_node_is_lost_gets_another(grown: Grown, smollm2: Path) -> None:
    with Client(grown.running.target) as client:
        (former,) = endpoints(client.cluster_state(), "generate")
        os.kill(parent_of(listener(former)), signal.SIGKILL)  # the node's raylet
        until(lambda: not all(group.is_ready for group in client.cluster_state().groups))
        until_settled(grown.running, client, within_s=200)  # tries to start it come after ever longer pauses
        assert endpoints(client.cluster_state(), "generate") != (former,)
    ask(grown, smollm2, 900)
    until(lambda: nodes_by_type(grown.ray) == {"prefill": 1, "generate": 1})


def parent_of(pid: int) -> int:
    return int((Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])


def ask(grown: Grown, smollm2: Path, start: int) -> None:
    """An answer, which must be the model's."""
    prompt = passage_ids(smollm2, 90, start)
    with Client(grown.running.target) as client:
        answer = client.generate(token_ids=prompt, params=PARAMS).collect()
    check_equal_tokens(load_decoder(smollm2), prompt, [token.token_id for token in answer.tokens], PARAMS)
