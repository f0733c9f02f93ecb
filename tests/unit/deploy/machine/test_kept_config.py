"""A model's configuration is kept when it was read, and read again once any of its files has changed."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from baton.errors import ModelError
from deploy.machine.kept_config import model_config
from modeling.checkpoints import weights

SHAPE: dict[str, Any] = {
    "vocab_size": 97,
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
}
SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CONFIGS = [
    {**SHAPE, "model_type": "llama"},
    {**SHAPE, "model_type": "llama", "rope_scaling": SCALING},
    {**SHAPE, "model_type": "mistral", "sliding_window": 8},
]


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which configurations are kept, which is not there yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "baton" / "configs"


def written(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: str(config["model_type"]))
@pytest.mark.usefixtures("kept")
def test_what_was_kept_is_what_the_family_reads(
    config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = written(tmp_path / "model", config)
    read = weights.load_config(folder)
    assert model_config(folder) == read
    monkeypatch.delattr(weights, "load_config")
    assert model_config(folder) == read
    assert model_config(written(tmp_path / "copy", config)) == read


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "quant_config.json"])
@pytest.mark.usefixtures("kept")
def test_a_changed_file_is_read_again(name: str, tmp_path: Path) -> None:
    folder = written(tmp_path / "model", CONFIGS[0])
    model_config(folder)
    (folder / name).write_text("[]")
    with pytest.raises(ModelError, match=f"{name}: is not a JSON object"):
        model_config(folder)


def test_a_model_that_cannot_be_run_is_refused_and_not_kept(kept: Path, tmp_path: Path) -> None:
    folder = written(tmp_path / "model", {**SHAPE, "model_type": "unheard-of"})
    for _ in range(2):
        with pytest.raises(ModelError, match="'unheard-of' is not supported"):
            model_config(folder)
    assert not kept.exists()


def test_what_cannot_be_read_or_kept_is_read_from_the_model(
    kept: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = written(tmp_path / "model", CONFIGS[0])
    read = model_config(folder)
    (path,) = kept.iterdir()
    path.write_text("{}")
    with caplog.at_level(logging.WARNING):
        assert model_config(folder) == read
    assert f"{path} cannot be read" in caplog.text
    path.unlink()
    kept.rmdir()
    kept.write_text("a file in the folder's place")
    with caplog.at_level(logging.WARNING):
        assert model_config(folder) == read
    assert f"{path} cannot be written" in caplog.text
