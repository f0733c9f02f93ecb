"""Models named by their repository on a hub. The hub's real client, in a child process, downloads them from a hub on
127.0.0.1."""

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.text.tokenizer import Tokenizer
from tests.support.clusters.on_ray.ray_clusters import run_baton
from tests.support.models.hub import COMMIT, Hub, serving
from tests.support.models.letter_models import write_letter_model

pytestmark = pytest.mark.integration

CI = pytest.mark.ci
NAME = "letters/tiny"
RESOLVE = """
import sys
from pathlib import Path
from rich.console import Console
from baton.errors import BatonError
from deploy.machine.model_folder import resolve_folder
try:
    weights = sys.argv[3:] != ["without"]
    print(resolve_folder(sys.argv[1], Path(sys.argv[2]), Console(stderr=True), weights=weights))
except BatonError as error:
    print(f"{type(error).__name__}: {error}")
"""


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    """A hub with one model, which holds more than Baton needs."""
    folder = tmp_path / "served"
    (folder / "original").mkdir(parents=True)
    write_letter_model(folder)
    for name in ("README.md", "pytorch_model.bin", "original/model.safetensors", "modeling_letters.py", "tiny.gguf"):
        (folder / name).write_bytes(b"not needed")
    made = Hub({NAME: folder})
    with serving(made):
        yield made


def resolved(endpoint: str, home: Path, name: str = NAME, *more: str, **environment: str) -> tuple[str, str]:
    """What a process that looks for the model prints, and what it shows."""
    settings = {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0", "NO_PROXY": "127.0.0.1"}
    run = subprocess.run(
        [sys.executable, "-c", RESOLVE, name, str(home / "baton"), *more],
        env={**os.environ, **settings, **environment},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return run.stdout.strip(), run.stderr


def test_the_files_that_are_needed_come_and_then_from_the_cache(hub: Hub, tmp_path: Path) -> None:
    folder, shown = resolved(hub.endpoint, tmp_path / "home", FORCE_COLOR="1")
    assert Path(folder).name == COMMIT
    needed = ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    assert sorted(path.name for path in Path(folder).iterdir()) == needed
    for name in needed:
        assert (Path(folder) / name).read_bytes() == (hub.repositories[NAME] / name).read_bytes()
    assert f"downloading {NAME}" in shown
    size = (Path(folder) / "model.safetensors").stat().st_size
    assert f"{size / 1000:.1f}/{size / 1000:.1f} kB" in shown
    hub.asked.clear()
    assert resolved(hub.endpoint, tmp_path / "home") == (folder, "")
    assert hub.fetched() == []


@pytest.mark.ci
def test_without_a_network_the_cache_serves(hub: Hub, tmp_path: Path) -> None:
    folder, _ = resolved(hub.endpoint, tmp_path / "home")
    hub.asked.clear()
    assert resolved(hub.endpoint, tmp_path / "home", HF_HUB_OFFLINE="1")[0] == folder
    assert hub.asked == []
    unreachable = "http://127.0.0.1:9"
    assert resolved(unreachable, tmp_path / "home")[0] == folder


@pytest.mark.ci
def test_a_cut_download_goes_on_where_it_was_cut(hub: Hub, tmp_path: Path) -> None:
    """The client keeps what has come in chunks of some MiB."""
    served = hub.repositories[NAME] / "model.safetensors"
    served.write_bytes(random.Random(0).randbytes(24 << 20))
    hub.cuts[served.name] = 1
    folder, _ = resolved(hub.endpoint, tmp_path / "home")
    assert (Path(folder) / served.name).read_bytes() == served.read_bytes()
    first, second = [
        range for method, path, range in hub.asked if method == "GET" and path.endswith("model.safetensors")
    ]
    assert first is None
    assert second is not None
    assert 0 < int(second.removeprefix("bytes=").removesuffix("-")) <= 12 << 20


@pytest.mark.ci
def test_a_branch_or_commit_may_be_named(hub: Hub, tmp_path: Path) -> None:
    assert Path(resolved(hub.endpoint, tmp_path / "home", f"{NAME}@main")[0]).name == COMMIT
    said, _ = resolved(hub.endpoint, tmp_path / "home", f"{NAME}@nothing")
    assert said.startswith(f"ModelError: model '{NAME}@nothing': the hub {hub.endpoint} has the model")
    assert said.endswith("but not this revision; correct it")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("letters/none", "is neither a folder here nor a model on the hub {}; correct the name, or set HF_TOKEN"),
        pytest.param("letters/gated", ": the hub {} requires a login; accept the model's terms there", marks=CI),
        pytest.param("letters/a--b", "is not the name of a model", marks=CI),
    ],
)
def test_a_model_that_is_not_to_be_had_is_refused_in_one_line(hub: Hub, tmp_path: Path, name: str, said: str) -> None:
    hub.repositories["letters/gated"] = hub.repositories[NAME]
    hub.gated.add("letters/gated")
    shown, _ = resolved(hub.endpoint, tmp_path / "home", name)
    assert shown.startswith(f"ModelError: model {name!r}")
    assert said.format(hub.endpoint) in shown
    assert "\n" not in shown
    assert hub.fetched() == []


@pytest.mark.parametrize(
    ("without", "said"),
    [
        ("config.json", "has no config.json on the hub"),
        pytest.param("tokenizer.json", "has no tokenizer.json on the hub", marks=CI),
        pytest.param("model.safetensors", "choose a repository that holds safetensors", marks=CI),
    ],
)
def test_a_repository_in_another_format_is_refused(hub: Hub, tmp_path: Path, without: str, said: str) -> None:
    (hub.repositories[NAME] / without).unlink()
    shown, _ = resolved(hub.endpoint, tmp_path / "home")
    assert said in shown
    assert "model.safetensors" not in hub.fetched()


def test_a_model_of_no_family_is_refused_before_its_weights_are_fetched(hub: Hub, tmp_path: Path) -> None:
    path = hub.repositories[NAME] / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_type": "mamba", "architectures": ["Mamba"]}))
    shown, _ = resolved(hub.endpoint, tmp_path / "home")
    assert "model_type: 'mamba' is not supported" in shown
    assert "model.safetensors" not in hub.fetched()


@pytest.mark.ci
def test_a_front_door_needs_no_weights(hub: Hub, tmp_path: Path) -> None:
    folder, _ = resolved(hub.endpoint, tmp_path / "home", NAME, "without")
    assert Tokenizer.load(Path(folder)).encode("ab") == [65, 66]
    assert "model.safetensors" not in hub.fetched()
    assert resolved(hub.endpoint, tmp_path / "home")[0] == folder
    assert (Path(folder) / "model.safetensors").is_file()


def test_no_hub_and_no_cache_is_refused_before_anything_starts(tmp_path: Path) -> None:
    settings = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
    run = run_baton(tmp_path, "serve", "--set", f"model.name={NAME}", environment=settings)
    assert run.returncode == 1
    (line,) = run.stderr.splitlines()
    assert f"model '{NAME}' is neither a folder here nor in {tmp_path}/home/hub, and the hub http://127.0.0.1:9" in line
    assert "name a mirror by HF_ENDPOINT" in line
    assert run.stdout == ""


def test_a_folder_of_that_name_wins(hub: Hub, tmp_path: Path) -> None:
    folder = tmp_path / NAME
    shutil.copytree(hub.repositories[NAME], folder)
    assert resolved(hub.endpoint, tmp_path / "home", str(folder))[0] == str(folder)
    assert hub.asked == []
