"""A model's configuration is kept when it was read, and read again once any of its files has changed."""

import logging
from pathlib import Path
from typing import Any

import pytest

from baton.errors import ModelError
from baton.modeling.checkpoints import weights
from deploy.machine.resolved_model import model_config
from tests.support.models.config_folders import TINY, write_config

SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CONFIGS = [
    TINY,
    {**TINY, "rope_scaling": SCALING},
    {**TINY, "model_type": "mistral", "sliding_window": 8},
]


@pytest.fixture
def kept(cache: Path) -> Path:
    """The folder in which configurations are kept, which does not exist yet."""
    return cache / "baton" / "configs"


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: str(config["model_type"]))
@pytest.mark.usefixtures("kept")
def test_what_was_kept_is_what_the_family_reads(
    config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_config(tmp_path / "model", config)
    read = weights.load_config(folder)
    assert model_config(folder) == read
    monkeypatch.delattr(weights, "load_config")
    assert model_config(folder) == read
    assert model_config(write_config(tmp_path / "copy", config)) == read


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "quant_config.json"])
@pytest.mark.usefixtures("kept")
def test_a_changed_file_is_read_again(name: str, tmp_path: Path) -> None:
    folder = write_config(tmp_path / "model", TINY)
    model_config(folder)
    (folder / name).write_text("[]")
    with pytest.raises(ModelError, match=f"{name}: is not a JSON object"):
        model_config(folder)


def test_a_model_that_cannot_be_run_is_refused_and_not_kept(kept: Path, tmp_path: Path) -> None:
    folder = write_config(tmp_path / "model", {**TINY, "model_type": "unheard-of"})
    for _ in range(2):
        with pytest.raises(ModelError, match="'unheard-of' is not supported"):
            model_config(folder)
    assert not kept.exists()


def test_what_cannot_be_read_or_kept_is_read_from_the_model(
    kept: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_config(tmp_path / "model", TINY)
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
