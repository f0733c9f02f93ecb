"""Models reduced to their first layers, with the same tokenizer and shapes but less computation."""

import json
import re
import shutil
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file

NUM_LAYERS = 6


def write_first_layers(whole: Path, folder: Path) -> Path:
    """Write the first NUM_LAYERS layers of the model in `whole` to the new folder `folder`, and return `folder`."""
    shutil.copytree(whole, folder, ignore=shutil.ignore_patterns("model.safetensors"))
    config = json.loads((whole / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": NUM_LAYERS}))
    with safe_open(whole / "model.safetensors", "pt") as file:
        names = [name for name in file.keys() if _layer(name) < NUM_LAYERS]  # noqa: SIM118
        save_file({name: file.get_tensor(name) for name in names}, folder / "model.safetensors")
    return folder


def _layer(name: str) -> int:
    """Return the index of a tensor's layer; 0 if it does not belong to a layer."""
    found = re.search(r"layers[.](\d+)[.]", name)
    return int(found[1]) if found else 0
