"""A cluster on a Ray that was there before: joined, served from, left as it was found."""

import contextlib
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton import Client
from baton.sampling_params import SamplingParams
from modeling.checkpoints.weights import load_decoder
from tests.support.clusters.ray_clusters import START_S, launched, ready, run_baton, served, until
from tests.support.clusters.ray_heads import RayHead, ray_head, ray_node
from tests.support.models.reference import check_equal_tokens
from tests.support.models.texts import passage_ids

pytestmark = pytest.mark.cluster

PARAMS = SamplingParams(max_tokens=16, ignore_eos=True)
POOLS = {"baton_prefill": 2, "baton_generate": 1}


@pytest.fixture(scope="module", params=["asks for a token", pytest.param("asks for none", marks=pytest.mark.nightly)])
def head(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayHead]:
    token = None
    if request.param == "asks for a token":
        token = tmp_path_factory.mktemp("ray") / "token"
        token.write_text(secrets.token_hex(32))
    with ray_head(POOLS, token=token) as running:
        yield running


def variables(head: RayHead) -> dict[str, str]:
    """What an operator exports who has that Ray's token."""
    return {} if head.token is None else {"RAY_AUTH_TOKEN_PATH": str(head.token)}


@pytest.mark.ci
@pytest.mark.parametrize("how", ["interrupt", pytest.param("kill the launcher, then stop", marks=pytest.mark.nightly)])
def test_nothing_of_a_cluster_is_left_on_a_ray_that_it_joined(
    head: RayHead, smollm2: Path, tmp_path: Path, how: str
) -> None:
    prompt = passage_ids(smollm2, 90)
    with served(tmp_path, smollm2, address=head.address, environment=variables(head)) as running:
        with Client(running.target) as client:
            answer = client.generate(token_ids=prompt, params=PARAMS).collect()
        check_equal_tokens(load_decoder(smollm2), prompt, [token.token_id for token in answer.tokens], PARAMS)
        assert not head.is_empty()
        if how == "interrupt":
            running.interrupt()
            assert running.process.wait(60) == 0
        else:
            running.process.kill()
            running.process.wait()
            stopped = run_baton(tmp_path, "stop", environment=variables(head))
            assert stopped.returncode == 0, stopped.stderr
    until(head.is_empty)
    assert not list((tmp_path / "baton" / "clusters").iterdir())


@pytest.mark.ci
def test_a_cluster_waits_for_the_nodes_of_its_pools_and_runs_on_them(smollm2: Path, tmp_path: Path) -> None:
    """As the manifests start it: the head declares no CPUs and no pool, and labelled nodes come after `baton serve`."""
    labels = {role: f"baton-pool={role}" for role in ("prefill", "generate")}
    settings = [f'{role}.node_labels=["{label}"]' for role, label in labels.items()]
    prompt = passage_ids(smollm2, 90)
    with contextlib.ExitStack() as held:
        head = held.enter_context(ray_head({}, num_cpus=0))
        asked = launched(tmp_path, smollm2, "ray.node_wait_s=100", *settings, address=head.address)
        starting = held.enter_context(asked)
        until(lambda: starting.stderr.count("waits up to 120 s for a node with room for it") == 2, START_S)
        for role, size in (("prefill", 2), ("generate", 1)):
            held.enter_context(ray_node(head, {f"baton_{role}": size}, label=labels[role]))
        with Client(ready(starting).target) as client:
            answer = client.generate(token_ids=prompt, params=PARAMS).collect()
        check_equal_tokens(load_decoder(smollm2), prompt, [token.token_id for token in answer.tokens], PARAMS)
        starting.interrupt()
        assert starting.process.wait(60) == 0


@pytest.mark.ci
def test_groups_that_no_node_can_hold_are_refused_at_once(head: RayHead, smollm2: Path, tmp_path: Path) -> None:
    settings = (f"model.name={smollm2}", "orchestrator.port=0", "http.port=-1", "prefill.num_ranks=3")
    options = ("--address", head.address, *(part for each in settings for part in ("--set", each)))
    began_s = time.monotonic()
    refused = run_baton(tmp_path, "serve", *options, environment=variables(head))
    assert time.monotonic() - began_s < 60  # where starting a worker may take 120
    assert refused.returncode == 1
    reason = refused.stderr.splitlines()[-1]
    assert reason.startswith("baton: Ray has no room for prefill-0 (3 workers, each baton_prefill 1, CPU 0.01, memory ")
    assert "Traceback" not in refused.stderr
    until(head.is_empty)
    assert not list((tmp_path / "baton" / "clusters").iterdir())


@pytest.mark.ci
def test_a_gateway_asks_a_ray_with_its_token_for_the_orchestrator(head: RayHead, tmp_path: Path) -> None:
    lone = ("gateway", "--address", head.address, "--cluster", "lone")
    refused = run_baton(tmp_path, *lone, environment=variables(head))
    assert refused.returncode == 1
    reason = f"cluster lone on Ray at {head.address} does not serve: start it with `baton serve`, or check --cluster"
    assert refused.stderr.splitlines()[-1] == f"baton: {reason}"
    if head.token is not None:
        refused = run_baton(tmp_path, *lone, environment={"RAY_AUTH_MODE": "disabled"})
        assert "asks for a token" in refused.stderr
