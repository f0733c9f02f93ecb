"""Model folders that contain a configuration but no weights."""

import json
from pathlib import Path
from typing import Any

TINY: dict[str, Any] = {
    "model_type": "llama",
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
SMALL: dict[str, Any] = {
    **TINY,
    "vocab_size": 49152,
    "num_hidden_layers": 30,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
}
"""Configuration with the sizes of SmolLM2-135M."""
LLAMA_8B: dict[str, Any] = {
    **TINY,
    "vocab_size": 128256,
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
}
"""Configuration with the sizes of Llama 3.1 8B."""


def write_config(folder: Path, config: dict[str, Any] = TINY) -> Path:
    """Write config.json to the folder, and return the folder. The folder is created if it does not exist."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder
