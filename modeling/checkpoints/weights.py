"""Loads a Hugging Face folder (config.json and safetensors) into a Decoder, as its family composes it.

A worker's host calls `load_decoder` once at its start, before any request, on whatever thread; it blocks.
"""

from pathlib import Path

from baton.errors import ModelError
from baton.types import QUANTIZATIONS
from modeling.checkpoints.registry import read_model
from modeling.device.cpu import CpuDevice
from modeling.device.port import Device
from modeling.families.checkpoint import Checkpoint, read_json
from modeling.families.family import Family
from modeling.forward.decoder import Decoder
from modeling.forward.model_config import ModelConfig
from modeling.kv.buffers import TORCH_DTYPES


def load_config(folder: Path) -> ModelConfig:
    """Return the config in `folder`'s config.json and, if there, generation_config.json. Raises ModelError."""
    return _load_model(folder).config


def load_decoder(
    folder: Path, *, dtype: str = "float32", device: Device | None = None, quantization: str = "none"
) -> Decoder:
    """Return a Decoder that computes in `dtype` on `device`, from a Hugging Face folder; conversion happens on load.
    Without a device it is the CPU.

    Raises ModelError, one line, for anything wrong with the folder, the dtype or the memory. Its weights'
    fingerprint hashes every tensor's name, type, shape and bytes, the config, `dtype` and `quantization`; it does not
    depend on how the checkpoint is split into files.
    """
    if dtype not in TORCH_DTYPES:
        raise ModelError(f"dtype {dtype!r} is not supported; choose one of {', '.join(TORCH_DTYPES)}")
    if quantization not in QUANTIZATIONS:
        raise ModelError(f"quantization {quantization!r} is not supported; choose one of {', '.join(QUANTIZATIONS)}")
    model = _load_model(folder)
    device = device or CpuDevice()
    checkpoint = Checkpoint(folder, TORCH_DTYPES[dtype], str(device.torch_device), int8=quantization == "int8")
    return Decoder(model.config, model.load(checkpoint), device=device)


def _load_model(folder: Path) -> Family:
    if not folder.is_dir():
        raise ModelError(f"{folder}: is not a model folder; give the path of a folder that holds config.json")
    generation_file = folder / "generation_config.json"
    generation = read_json(generation_file) if generation_file.exists() else None
    return read_model(read_json(folder / "config.json"), generation, str(folder / "config.json"))
