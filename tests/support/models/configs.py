"""Hugging Face configurations that must be refused, and small checkpoints written to a folder."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file
from torch import Tensor

from baton.errors import ModelError
from baton.modeling.checkpoints.registry import read_model
from baton.modeling.checkpoints.weights import load_decoder
from baton.modeling.forward.decoder import Decoder


def refusal(config: Mapping[str, Any]) -> str:
    """Return the one-line error with which a configuration is refused, without the file's name. Checks that the error
    names a remedy."""
    with pytest.raises(ModelError) as refused:
        read_model(dict(config), source="folder/config.json")
    message = str(refused.value)
    assert message.startswith("folder/config.json: ")
    assert ";" in message, "no remedy"
    assert "\n" not in message
    return message.removeprefix("folder/config.json: ")


def write_and_load(folder: Path, config: Mapping[str, Any], tensors: dict[str, Tensor]) -> Decoder:
    """Write a checkpoint with a single file, and load it."""
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return load_decoder(folder)
