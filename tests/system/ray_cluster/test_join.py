"""A cluster joins an existing Ray instance, serves, and leaves the instance as it was."""

from pathlib import Path

import pytest

from baton import Client
from baton.sampling_params import SamplingParams
from tests.support.clusters.on_ray.ray_clusters import check_answer, run_baton, served, until
from tests.support.clusters.on_ray.ray_heads import RayHead
from tests.support.engines.generation import prompt

pytestmark = [pytest.mark.cluster, pytest.mark.ci]

PARAMS = SamplingParams(max_tokens=16, ignore_eos=True)


@pytest.mark.parametrize("how", ["interrupt", pytest.param("kill the launcher, then stop", marks=pytest.mark.nightly)])
def test_nothing_of_a_cluster_is_left_on_a_ray_that_it_joined(
    bare: RayHead, letters: Path, tmp_path: Path, how: str
) -> None:
    with served(tmp_path, letters, address=bare.address) as running:
        with Client(running.target) as client:
            answer = client.generate(token_ids=prompt(90), params=PARAMS).collect()
        check_answer(running, prompt(90), answer, PARAMS)
        assert not bare.is_empty()
        if how == "interrupt":
            running.interrupt()
            assert running.process.wait(60) == 0
        else:
            running.process.kill()
            running.process.wait()
            stopped = run_baton(tmp_path, "stop")
            assert stopped.returncode == 0, stopped.stderr
    until(bare.is_empty)
    assert not list((tmp_path / "baton" / "clusters").iterdir())


def test_groups_that_no_node_can_hold_are_refused_at_once(bare: RayHead, letters: Path, tmp_path: Path) -> None:
    settings = (f"model.name={letters}", "orchestrator.port=0", "http.port=-1", "prefill.num_ranks=5")
    options = ("--address", bare.address, *(part for each in settings for part in ("--set", each)))
    refused = run_baton(tmp_path, "serve", *options)
    assert refused.returncode == 1
    reason = refused.stderr.splitlines()[-1]
    assert reason.startswith("baton: Ray has no room for prefill-0 (5 workers, each baton_prefill 1, CPU 0.01, memory ")
    assert "; not within" not in reason  # nothing was waited for
    assert "Traceback" not in refused.stderr
    assert not list((tmp_path / "baton" / "clusters").iterdir())
