"""Loads a Hugging Face folder (config.json and safetensors) as a Decoder. The model's family builds the layers.

A worker process calls `load_decoder` once at startup, before any request, on any thread. The call blocks.
"""

import logging
from pathlib import Path

from baton.errors import ModelError
from baton.modeling.checkpoints.registry import read_model
from baton.modeling.checkpoints.shared_weights import Loaded, shared_weights
from baton.modeling.checkpoints.stored_format import load_format
from baton.modeling.device.cpu import CpuDevice
from baton.modeling.device.port import Device
from baton.modeling.families.checkpoint import Checkpoint, WeightFormat
from baton.modeling.families.family import Family
from baton.modeling.families.fields import read_json
from baton.modeling.forward.decoder import Decoder
from baton.modeling.forward.model_config import ModelConfig
from baton.modeling.kv.buffers import TORCH_DTYPES
from baton.types import WEIGHT_FORMS

logger = logging.getLogger(__name__)

_DEQUANTISED = "dequantised to"


def load_config(folder: Path) -> ModelConfig:
    """Return the model's config from config.json and, if it exists, generation_config.json in `folder`. Raises
    ModelError if the model or the quantisation format of its weights is not supported."""
    config = _load_model(folder).config
    load_format(folder)
    return config


def load_decoder(
    folder: Path,
    *,
    dtype: str = "float32",
    device: Device | None = None,
    weights: str = "stored",
    shared: bool = False,
) -> Decoder:
    """Load a Hugging Face folder and return a Decoder that computes in `dtype` on `device`. `device` None: the CPU.
    Weights are converted to `dtype` as they are loaded.

    `weights` is one of WEIGHT_FORMS. Quantised weights that are not kept as they are stored are dequantised to `dtype`
    one tensor at a time, and the log reports this in one line. Raises ModelError with a one-line message if the folder
    is invalid, the dtype is not supported, or there is too little memory.

    `shared`: True to keep weights on the CPU in memory that all processes of this node share (`shared_weights`).

    The fingerprint of the weights is a hash of every tensor (name, type, shape and stored bytes), the config, the
    quantisation format, `dtype`, and whether weights are rounded to int8. It does not depend on how the checkpoint is
    split into files, nor on whether codes are kept: KV then differs by no more than between batches of other sizes.
    """
    if dtype not in TORCH_DTYPES:
        raise ModelError(f"dtype {dtype!r} is not supported; choose one of {', '.join(TORCH_DTYPES)}")
    if weights not in WEIGHT_FORMS:
        raise ModelError(f"weights {weights!r} is not supported; choose one of {', '.join(WEIGHT_FORMS)}")
    model, stored = _load_model(folder), load_format(folder)
    device = device or CpuDevice()

    def load() -> Loaded:
        where = str(device.torch_device)
        checkpoint = Checkpoint(folder, TORCH_DTYPES[dtype], where, weights=weights, weight_format=stored)
        found = model.load(checkpoint)
        return Loaded(found, "" if stored is None else _account(stored, checkpoint, dtype))

    is_shared = shared and isinstance(device, CpuDevice)
    loaded = shared_weights(folder, f"{dtype}/{weights}", load) if is_shared else load()
    if loaded.account:
        level = logging.WARNING if _DEQUANTISED in loaded.account else logging.INFO
        logger.log(level, "%s: %s", folder, loaded.account)
    return Decoder(model.config, loaded.weights, device=device)


def _account(stored: WeightFormat, checkpoint: Checkpoint, dtype: str) -> str:
    """Return a log line that reports how a checkpoint's quantised weights were loaded, and which of its tensors were
    not used."""
    counts = {"kept as stored": checkpoint.num_kept, f"{_DEQUANTISED} {dtype}": checkpoint.num_dequantised}
    done = ", ".join(f"{number} weights {what}" for what, number in counts.items() if number)
    tensors = [f"{number} {kind}" for kind, number in sorted(checkpoint.num_unused.items())]
    unused = ", ".join([*stored.unused, *tensors])
    return f"{stored.description}: {done}{f'; not used: {unused}' if unused else ''}"


def _load_model(folder: Path) -> Family:
    if not folder.is_dir():
        raise ModelError(f"{folder}: is not a model folder; give the path of a folder that holds config.json")
    generation_file = folder / "generation_config.json"
    generation = read_json(generation_file) if generation_file.exists() else None
    return read_model(read_json(folder / "config.json"), generation, str(folder / "config.json"))
