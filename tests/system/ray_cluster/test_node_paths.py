"""Nodes that lack what the launcher names by its own paths find copies of it, get it from Ray, or refuse by name."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
import ray

from baton import Client
from baton.sampling_params import SamplingParams
from deploy.commands.ray_access import prepare_to_join
from deploy.ray_cluster.kept_files import file_here, forget_files, keep_file
from modeling.checkpoints.weights import load_decoder
from tests.support.clusters.hosts import Host, can_make_hosts, hosts
from tests.support.clusters.ray_clusters import launched, served
from tests.support.clusters.ray_heads import RayHead, ray_head, ray_node
from tests.support.models.reference import check_equal_tokens
from tests.support.models.texts import passage_ids

pytestmark = [pytest.mark.cluster, pytest.mark.ci]


@dataclass(frozen=True)
class Bare:
    """A launcher's host, and one for workers that does not see the launcher's folder."""

    ray: RayHead
    launcher: Host
    worker: Host
    drafts: Path
    """Path of a model that drafts, which only the launcher has."""
    share: Path
    """A folder with a copy of it, which both have."""

    @property
    def settings(self) -> tuple[str, ...]:
        drafts = ("generate.speculation=model", f"generate.draft_model={self.drafts}")
        return ("prefill.num_groups=0", f"orchestrator.host={self.launcher.address}", *drafts)


@pytest.fixture(scope="module")
def bare(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bare]:
    if not can_make_hosts():
        pytest.skip("addresses of the loopback interface share all folders")
    own, share = tmp_path_factory.mktemp("launcher"), tmp_path_factory.mktemp("share")
    for folder in (own, share):
        (folder / "drafts").symlink_to(smollm2, target_is_directory=True)
    with ExitStack() as stack:
        launcher, worker = stack.enter_context(hosts(2))
        worker.run("mount", "-t", "tmpfs", "tmpfs", str(own))
        head = stack.enter_context(ray_head({}, host=launcher))
        stack.enter_context(ray_node(head, {"baton_generate": 1}, worker))
        yield Bare(head, launcher, worker, own / "drafts", share)


def test_a_node_finds_a_copy_of_the_draft_model(bare: Bare, smollm2: Path, tmp_path: Path) -> None:
    prompt, params = passage_ids(smollm2, 60), SamplingParams(max_tokens=16, ignore_eos=True, num_drafts=2)
    settings = (*bare.settings, f'model.search=["{bare.share}"]')
    with (
        served(tmp_path, smollm2, *settings, address=bare.ray.address, host=bare.launcher) as running,
        Client(running.target) as client,
    ):
        answer = client.generate(token_ids=prompt, params=params).collect()
    check_equal_tokens(load_decoder(smollm2), prompt, [token.token_id for token in answer.tokens], params)
    assert answer.timings is not None and answer.timings.speculation is not None
    assert [each.source for each in answer.timings.speculation.sources] == ["model"]


def test_a_node_without_the_draft_model_refuses_and_says_which(bare: Bare, smollm2: Path, tmp_path: Path) -> None:
    with launched(tmp_path, smollm2, *bare.settings, address=bare.ray.address, host=bare.launcher) as starting:
        assert starting.process.wait(90) == 1
    assert starting.stderr.splitlines()[-1] == (
        f"baton: generate-0: on node {bare.worker.address}: generate.draft_model = {bare.drafts} is missing, and "
        "model.search is empty: put a copy of that name there"
    )


def test_small_files_travel_by_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    given, kept = tmp_path / "given.json", tmp_path / "cache" / "baton" / "calibrations" / "kept.json"
    kept.parent.mkdir(parents=True)
    with ray_head({}) as head:
        prepare_to_join(head.address)
        ray.init(head.address, namespace="files", configure_logging=False, log_to_driver=False)
        try:
            assert file_here("files", given) == given and not given.exists()  # nothing is kept
            for path in (given, kept):
                path.write_text(path.name)
                keep_file("files", path)
                path.unlink()
                keep_file("files", path)  # what is kept stays
            copy = file_here("files", given)
            assert copy.read_text() == "given.json" and copy.is_relative_to(tmp_path / "cache")
            assert file_here("files", kept) == kept and kept.read_text() == "kept.json"
            assert file_here("others", given) == given
            kept.write_text("measured here")
            assert file_here("files", kept).read_text() == "measured here"
            kept.unlink()
            forget_files("files")
            assert file_here("files", kept) == kept and not kept.exists()
        finally:
            ray.shutdown()
