"""A model may take another's place while a cluster serves if nothing but its weights differs."""

import json
import shutil
from pathlib import Path

import pytest

from baton.errors import ConfigError, ModelError
from deploy.machine.model_folder import require_alike


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
    require_alike(other, smollm2)


def test_another_shape_is_refused(smollm2: Path, other: Path) -> None:
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2}))
    with pytest.raises(ConfigError, match="differ in config.json: only weights may, start another cluster"):
        require_alike(other, smollm2)


@pytest.mark.parametrize("name", ["tokenizer.json", "chat_template.jinja"])
def test_another_tokenizer_or_template_is_refused(smollm2: Path, other: Path, name: str) -> None:
    (other / name).write_text("{}")
    with pytest.raises(ConfigError, match=f"differ in {name}"):
        require_alike(other, smollm2)


def test_no_model_is_refused(smollm2: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="is not a model folder"):
        require_alike(tmp_path / "absent", smollm2)


def test_a_template_that_is_missing_is_another(smollm2: Path, other: Path) -> None:
    (other / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match="differ in chat_template.jinja"):
        require_alike(other, smollm2)
