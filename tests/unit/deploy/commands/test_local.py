"""`baton local` is configured as a cluster is; its options are short for fields."""

import os
from pathlib import Path
from typing import Any

import pytest

from deploy.cli import main
from deploy.commands import session
from deploy.config.cluster import ClusterConfig
from tests.support.wire.commands import Baton


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[ClusterConfig]:
    """The configurations that sessions were run with; none is run."""
    configs: list[ClusterConfig] = []

    def run_session(config: ClusterConfig, *_: Any) -> int:
        configs.append(config)
        return 0

    monkeypatch.setattr(session, "run_session", run_session)
    return configs


def test_without_options_it_is_a_cluster_of_this_process_that_shows_its_chain(asked: list[ClusterConfig]) -> None:
    assert main(["local", "a prompt"]) == 0
    config = asked[0]
    assert config.name == f"local-{os.getpid()}"
    assert config.orchestrator.disaggregation == "always"
    assert config.group_sizes == {"prefill-0": 2, "generate-0": 1}


def test_options_are_fields_over_the_files_and_assignments_win(asked: list[ClusterConfig], tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text('[model]\ndtype = "float32"\nname = "other"\n[generate]\nnum_slots = 3\n')
    model = 'a "quoted" \U0001f600 model'
    options = ["--config", str(path), "--model", model, "--ranks", "3", "--threads", "2", "--cache", str(tmp_path)]
    assert main(["local", *options, "--set", "prefill.num_ranks=4", "a prompt"]) == 0
    config = asked[0]
    assert (config.model.name, config.model.dtype, config.model.cache) == (model, "float32", tmp_path)
    assert (config.prefill.num_ranks, config.generate.num_threads, config.generate.num_slots) == (4, 2, 3)


def test_colocated_has_no_ranks(asked: list[ClusterConfig]) -> None:
    assert main(["local", "--colocated", "--weights", "int8", "a prompt"]) == 0
    assert asked[0].group_sizes == {"generate-0": 1}
    assert asked[0].model.weights == "int8"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--ranks", "0"], "--ranks 0 is out of range: use at least 1, or --colocated"),
        (["--threads", "-1"], "generate.num_threads = -1 is wrong"),
        (["--set", "generate.num_slots=0"], "generate.num_slots = 0 is wrong"),
    ],
)
def test_a_wrong_option_is_refused_in_one_line(
    options: list[str], text: str, asked: list[ClusterConfig], baton: Baton
) -> None:
    assert text in baton.refusal(["local", *options, "a prompt"])
    assert not asked
