"""A model may take another's place while a cluster serves if only weights differ. Drafts come from a folder. Nodes find
the model in their own ways."""

import json
import shutil
from pathlib import Path

import pytest
from rich.console import Console

from baton.errors import ConfigError, ModelError
from baton.settings.place import WorkerPlace
from deploy.config.file import load_config
from deploy.machine.cluster_plan import ClusterPlan
from deploy.machine.model_folder import folder_on_node, require_alike, resolve_drafts, section_on_node
from deploy.machine.resolved_model import ResolvedModel
from generate_workers.config import EngineConfig
from tests.support.wire.secret import SECRET


@pytest.fixture
def other(smollm2: Path, tmp_path: Path) -> Path:
    """The same, without weights."""
    for path in smollm2.iterdir():
        if path.suffix != ".safetensors":
            shutil.copy(path, tmp_path)
    return tmp_path


def test_weights_may_differ_and_notes_in_the_configuration(smollm2: Path, other: Path) -> None:
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "transformers_version": "0"}))
    require_alike(ResolvedModel(other), ResolvedModel(smollm2))


def test_another_shape_is_refused(smollm2: Path, other: Path) -> None:
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2}))
    with pytest.raises(ConfigError, match="differ in config.json: only weights may, start another cluster"):
        require_alike(ResolvedModel(other), ResolvedModel(smollm2))


@pytest.mark.parametrize(
    ("name", "content"), [("tokenizer.json", "{}"), ("chat_template.jinja", "{}"), ("chat_template.jinja", None)]
)
def test_another_tokenizer_or_template_is_refused(smollm2: Path, other: Path, name: str, content: str | None) -> None:
    (other / name).unlink()
    if content is not None:
        (other / name).write_text(content)
    with pytest.raises(ConfigError, match=f"differ in {name}"):
        require_alike(ResolvedModel(other), ResolvedModel(smollm2))


def test_no_model_is_refused(smollm2: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="is not a model folder"):
        require_alike(ResolvedModel(tmp_path / "absent"), ResolvedModel(smollm2))


def test_workers_get_the_draft_model_s_folder(smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = ResolvedModel(smollm2)
    plain = ClusterPlan(load_config(None, []), model)
    assert resolve_drafts(plain, Console(stderr=True)) is plain
    monkeypatch.chdir(smollm2.parent)  # which is not where workers run
    config = load_config(None, ["generate.speculation=model", f"generate.draft_model={smollm2.name}"])
    plan = resolve_drafts(ClusterPlan(config, model), Console(stderr=True))
    (worker,) = plan.config.workers("generate-0", WorkerPlace(model_folder=smollm2, secret=SECRET.text))
    assert isinstance(worker.section, EngineConfig)
    assert worker.section.draft_model == str(smollm2)
    unknown = load_config(None, ["generate.speculation=model", "generate.draft_model=gpt-5"])
    with pytest.raises(ModelError, match="model 'gpt-5' is neither a folder nor"):
        resolve_drafts(ClusterPlan(unknown, model), Console(stderr=True))


def test_a_node_takes_the_launcher_s_folder_where_it_has_one(tmp_path: Path) -> None:
    for folder in (tmp_path / "model", tmp_path / "share" / "model"):
        folder.mkdir(parents=True)
    place = WorkerPlace(model_folder=tmp_path / "model", model_search=(tmp_path / "share",))
    assert folder_on_node(place) == tmp_path / "model"


def test_a_node_looks_elsewhere_for_a_folder_of_that_name(tmp_path: Path) -> None:
    (tmp_path / "share" / "model").mkdir(parents=True)
    place = WorkerPlace(model_folder=tmp_path / "gone" / "model", model_search=(tmp_path, tmp_path / "share"))
    assert folder_on_node(place) == tmp_path / "share" / "model"


def test_a_node_may_get_the_model_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    place = WorkerPlace(model_folder=tmp_path / "model", model=str(tmp_path / "own"))
    assert folder_on_node(place) == tmp_path / "own"


def test_a_node_without_the_model_says_where_it_has_looked(tmp_path: Path) -> None:
    place = WorkerPlace(model_folder=tmp_path / "model", model="nothing", model_search=(tmp_path / "share",))
    with pytest.raises(ModelError, match="model is missing, model.search is .*/share, and model 'nothing' is neither"):
        folder_on_node(place)


def test_an_engine_finds_what_its_settings_name_below_the_folders_to_search(tmp_path: Path) -> None:
    launcher, share = tmp_path / "launcher", tmp_path / "share"
    (share / "small").mkdir(parents=True)
    (share / "chosen.safetensors").touch()
    place = WorkerPlace(model_folder=tmp_path, model_search=(tmp_path, share))
    section = EngineConfig(
        selection_file=str(launcher / "chosen.safetensors"), speculation="model", draft_model=str(launcher / "small")
    )
    found = section_on_node(section, place)
    assert (found.selection_file, found.draft_model) == (str(share / "chosen.safetensors"), str(share / "small"))
    (launcher / "small").mkdir(parents=True)
    assert section_on_node(section, place).draft_model == section.draft_model  # where the launcher has it
    assert section_on_node(EngineConfig(), place) == EngineConfig()


def test_an_engine_without_what_its_settings_name_says_where_it_has_looked(tmp_path: Path) -> None:
    place = WorkerPlace(model_folder=tmp_path, model_search=(tmp_path / "share",))
    section = EngineConfig(selection_file="/launcher/chosen.safetensors")
    text = "generate.selection_file = /launcher/chosen.safetensors is missing, and model.search is .*/share: put a copy"
    with pytest.raises(ConfigError, match=text):
        section_on_node(section, place)
