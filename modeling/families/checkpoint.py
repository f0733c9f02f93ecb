"""A Hugging Face folder's safetensors, read tensor by tensor, without pickle.

Families take their tensors from it when `modeling.checkpoints.weights` loads a model, on any thread; blocks. At most
one tensor is held besides those that were taken. Every tensor is hashed as it is read (XXH3).
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor

from baton.errors import ModelError
from modeling.kv.buffers import TORCH_DTYPES, byte_view

_HARMLESS = ("rotary_emb.inv_freq",)
"""Endings of tensors that old checkpoints carry and no family needs: RoPE is computed from the config."""
_PICKLES = ("*.bin", "*.pt", "*.pth")


class _TensorFile(Protocol):
    """An open safetensors file, as far as it is used here."""

    def keys(self) -> list[str]: ...

    def get_tensor(self, name: str) -> Tensor: ...


class Checkpoint:
    """The tensors of a folder's safetensors files; records which were taken, and their hashes. Used by one thread."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: str, *, int8: bool = False) -> None:
        self.int8 = int8
        """Whether the linear layers made of these tensors are to be rounded to int8."""
        self._folder = folder
        self._dtype = dtype
        self._device = device
        self._file_by_name = {name: path for path in _files(folder) for name in _tensor_names(path)}
        self._digests: dict[str, str] = {}
        self._repeated: set[str] = set()
        with self._allocating():
            torch.empty(0, device=device)

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return the tensor `name`, which must have this shape: a copy on the device, in the checkpoint's dtype."""
        return self.fuse([(name, shape)])

    def fuse(self, parts: Sequence[tuple[str, tuple[int, ...]]]) -> Tensor:
        """Return several tensors, one below the other, as one; read one at a time."""
        num_rows = sum(shape[0] for _, shape in parts)
        with self._allocating():
            fused = torch.empty((num_rows, *parts[0][1][1:]), dtype=self._dtype, device=self._device)
        start = 0
        for name, shape in parts:
            fused[start : start + shape[0]].copy_(self._read(name, shape))
            start += shape[0]
        return fused

    def has(self, name: str) -> bool:
        """Return whether the folder holds a tensor `name`."""
        return name in self._file_by_name

    def expect_equal(self, name: str, other: str) -> None:
        """Raise ModelError if there is a tensor `name` whose content is not that of `other`, which was taken before."""
        if name not in self._file_by_name:
            return
        with _opened(self._file_by_name[name]) as file:
            digest = _digest(file.get_tensor(name))
        if digest != self._digests[other]:
            remedy = "set tie_word_embeddings to false in config.json if the model has its own output head"
            raise ModelError(f"{self._folder}: {name} differs from {other}, to which it is tied; {remedy}")
        self._repeated.add(name)

    def seal(self, description: str) -> str:
        """Return a fingerprint of the tensors that were taken. Called once all are taken.

        Raises ModelError when a tensor is left over that could change the model's answers. The sixteen hex digits hash
        the tensors taken, the dtype, and `description`: all else that changes KV. Repeated tensors do not count.
        """
        left = self._file_by_name.keys() - self._digests.keys() - self._repeated
        unknown = sorted(name for name in left if not name.endswith(_HARMLESS))
        if unknown:
            remedy = "config.json describes another model; use the one that belongs to the weights"
            raise ModelError(f"{self._folder}: {len(unknown)} unknown tensors, the first is {unknown[0]}; {remedy}")
        format = f"{self._dtype}/int8" if self.int8 else str(self._dtype)
        total = xxhash.xxh3_64(f"{format}/{description}".encode())
        for name in sorted(self._digests):
            total.update(f"{name}={self._digests[name]};".encode())
        return total.hexdigest()

    def _read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        path = self._file_by_name.get(name)
        if path is None:
            raise ModelError(f"{self._folder}: tensor {name} is missing; download the model again")
        with _opened(path) as file:
            tensor = file.get_tensor(name)
        if tuple(tensor.shape) != shape:
            problem = f"tensor {name} has shape {list(tensor.shape)}, config.json asks for {list(shape)}"
            raise ModelError(f"{path}: {problem}; use the config.json that belongs to the weights")
        if tensor.dtype not in TORCH_DTYPES.values():
            problem = f"tensor {name} has type {tensor.dtype}"
            raise ModelError(f"{path}: {problem}; use weights in {', '.join(TORCH_DTYPES)}, or a GGUF file")
        self._digests[name] = _digest(tensor)
        return tensor

    @contextmanager
    def _allocating(self) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, AssertionError) as error:  # torch without CUDA asserts
            reason = str(error).partition("\n")[0]
            remedy = "choose another device, a smaller dtype or a smaller model"
            raise ModelError(
                f"{self._folder}: cannot allocate on device {self._device!r} ({reason}); {remedy}"
            ) from error


def _files(folder: Path) -> Iterable[Path]:
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.exists():
        return [single]
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelError(f"{index}: weight_map is missing or empty; download the model again")
        names = sorted({str(name) for name in weight_map.values()})
        missing = [name for name in names if Path(name).name != name or not (folder / name).is_file()]
        if missing:
            raise ModelError(f"{index}: names {missing[0]}, which is not in {folder}; download the model again")
        return [folder / name for name in names]
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if pickles:
        remedy = "convert them to safetensors with transformers' save_pretrained on a machine that trusts them"
        raise ModelError(f"{folder}: holds only pickled weights ({pickles[0]}), which could run any code; {remedy}")
    raise ModelError(f"{folder}: holds no model.safetensors and no {index.name}; download the model again")


def _tensor_names(path: Path) -> list[str]:
    with _opened(path) as file:
        return list(file.keys())


@contextmanager
def _opened(path: Path) -> Iterator[_TensorFile]:
    """Yield the file, memory-mapped; its header and length are checked whenever it is opened."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path}: cannot be read ({error}); it may be truncated: download it again") from error


def _digest(tensor: Tensor) -> str:
    return f"{tensor.dtype}{list(tensor.shape)}{xxhash.xxh3_64_hexdigest(byte_view(tensor))}"


def read_json(path: Path) -> dict[str, object]:
    """Return the object that a JSON file holds. Raises ModelError."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror}); give the path of a model folder") from error
    except ValueError as error:
        raise ModelError(f"{path}: is not JSON ({error}); download the model again") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: is not a JSON object; download the model again")
    return value
