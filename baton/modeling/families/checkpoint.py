"""Reads the safetensors files of a Hugging Face folder tensor by tensor, without pickle.

Families load their tensors with this module when `baton.modeling.checkpoints.weights` loads a model, on any thread.
Blocks. In addition to the loaded tensors, at most one stored tensor is in memory at a time, or, if codes are kept, the
stored tensors of one linear layer and their codes in bytes. Quantised tensors are dequantised in parts of
`_PART_ELEMENTS` elements. The stored bytes of every tensor are hashed (XXH3).

Shape letters: N rows and K columns of a weight.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor

from baton.errors import ModelError
from baton.modeling.families.fields import read_json
from baton.modeling.kernels import native
from baton.modeling.kernels.calls.codes import StoredWeight, joined
from baton.modeling.kv.buffers import TORCH_DTYPES, byte_view
from baton.types import WeightForm

_HARMLESS = ("rotary_emb.inv_freq",)
"""Name suffixes of tensors that old checkpoints contain but that no family loads: RoPE frequencies, which are computed
from the config instead."""
_PICKLES = ("*.bin", "*.pt", "*.pth")
_PACKED = ("qweight", "weight_packed")
"""Last parts of the names of quantised weights whose values are packed, several per integer."""
_PART_ELEMENTS = 2**20
"""Maximum number of elements of a weight that are dequantised at a time (4 MiB in fp32). For very wide weights the
number is larger, because at least `_PART_ROWS` rows are dequantised at a time."""
_PART_ROWS = 32

Shapes = Mapping[torch.dtype, Collection[tuple[int, ...]]]
"""Allowed shapes of a tensor, for each allowed dtype."""


class StoredTensors(Protocol):
    """Access to the stored tensors of a checkpoint, for a `WeightFormat`."""

    def has(self, name: str) -> bool:
        """Return True if the checkpoint contains a tensor `name`."""

    def stored(self, name: str, allowed: Shapes) -> Tensor:
        """Load the tensor `name` as it is stored, without conversion, and record it as loaded. Raises ModelError if the
        tensor is missing or its dtype and shape are not in `allowed`."""

    def error(self, name: str, problem: str, remedy: str) -> ModelError:
        """Return a ModelError about the tensor `name`. The message contains the tensor's file, the problem and the
        remedy."""


class QuantisedWeight(Protocol):
    """Quantised weight of one module."""

    def rows(self, start: int, stop: int) -> Tensor:
        """Return the rows `start` to `stop` (exclusive), dequantised to fp32. `start` must be a multiple of 32."""

    def stored(self) -> StoredWeight | None:
        """Return the weight with its codes. None: the linear kernel cannot read codes of this kind."""


class WeightFormat(Protocol):
    """Format in which a checkpoint stores quantised weights. Its text (`str()`) must include all settings that affect
    the values of the weights, because the text is part of the fingerprint."""

    @property
    def description(self) -> str:
        """Return a short description of the format, for logs."""

    @property
    def unused(self) -> tuple[str, ...]:
        """Return, as readable text, the features that the checkpoint's quantisation config declares and Baton
        ignores."""

    def weight(self, module: str, shape: tuple[int, ...], tensors: StoredTensors) -> QuantisedWeight | None:
        """Return the weight of `module`, or None if this weight is not quantised. `shape` is the shape of the
        dequantised weight. Raises ModelError if the stored tensors do not fit the format."""

    def unused_kind(self, name: str) -> str | None:
        """Return the purpose of the tensor `name`, as readable text, if it may be skipped because no weight needs it.
        None: skipping this tensor would be an error."""


class _TensorFile(Protocol):
    """Methods of an open safetensors file that this module uses."""

    def keys(self) -> list[str]: ...

    def get_tensor(self, name: str) -> Tensor: ...


class Checkpoint:
    """Tensors in the safetensors files of a folder. The object records which tensors were loaded, and their hashes. Not
    thread-safe."""

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype,
        device: str,
        *,
        weights: WeightForm = "bfloat16",
        weight_format: WeightFormat | None = None,
    ) -> None:
        """Open the safetensors files in `folder`. Tensors are loaded in `dtype` on `device`. `weights`: form in which
        linear layers keep weights. The checkpoint itself does not round to int8. `weight_format`: format of quantised
        weights, or None if the weights are not quantised."""
        self.int8 = weights == "int8"
        """True if the model family must round the weights of linear layers to int8 when it builds the layers."""
        self.num_dequantised = 0
        """Number of weights that were dequantised while they were loaded."""
        self.num_kept = 0
        """Number of quantised weights that were loaded as they are stored."""
        on_cpu = device == "cpu" and dtype == torch.bfloat16
        self.keeps_codes = weights == "stored" and weight_format is not None and on_cpu and native.load()
        """True if quantised weights are kept as they are stored, where the linear kernel can read their codes."""
        self.num_unused: Counter[str] = Counter()
        """Number of tensors of a quantised checkpoint that were not loaded because no weight needs them, keyed by the
        purpose of the tensors (see `WeightFormat.unused_kind`). `seal` sets the numbers."""
        self._weight_format = weight_format
        self._folder = folder
        self.dtype = dtype
        """Dtype to which tensors are converted."""
        self.device = torch.device(device)
        """Device to which tensors are loaded."""
        self._file_by_name = {name: path for path in _files(folder) for name in _tensor_names(path)}
        self._digests: dict[str, str] = {}
        self._repeated: set[str] = set()
        with self._allocating():
            torch.empty(0, device=device)

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Load the tensor `name` and return a copy on the device, in the dtype of this checkpoint. Raises ModelError
        unless the tensor has this shape."""
        return self.fuse([(name, shape)])

    def fuse(self, parts: Sequence[tuple[str, tuple[int, ...]]]) -> Tensor:
        """Load several tensors and return them concatenated along dimension 0. The tensors are read one at a time."""
        num_rows = sum(shape[0] for _, shape in parts)
        with self._allocating():
            fused = torch.empty((num_rows, *parts[0][1][1:]), dtype=self.dtype, device=self.device)
        start = 0
        for name, shape in parts:
            self._fill(fused[start : start + shape[0]], name)
            start += shape[0]
        return fused

    def codes(self, parts: Sequence[tuple[str, tuple[int, int]]]) -> StoredWeight | None:
        """Load several quantised weights as they are stored, concatenated along the rows. `parts`: names of modules,
        and shapes of their weights. None: the weights are dequantised, with `fuse`, because they are not quantised or
        the linear kernel cannot read their codes."""
        if not self.keeps_codes or self._weight_format is None:
            return None
        found = [self._weight_format.weight(module, shape, self) for module, shape in parts]
        stored = [None if each is None else each.stored() for each in found]
        whole = joined([each for each in stored if each is not None]) if all(stored) else None
        if whole is None or not whole.is_supported:
            return None
        self.num_kept += len(parts)
        return whole

    def has(self, name: str) -> bool:
        """Return True if the folder contains a tensor `name`."""
        return name in self._file_by_name

    def expect_equal(self, name: str, other: str) -> None:
        """Check that the tensor `name` equals the tensor `other`, which must have been loaded before. Raises ModelError
        if they differ. Does nothing if `name` does not exist."""
        if name not in self._file_by_name:
            return
        with _opened(self._file_by_name[name]) as file:
            digest = _digest(file.get_tensor(name))
        if digest != self._digests.get(other):
            remedy = "set tie_word_embeddings to false in config.json if the model has its own output head"
            raise ModelError(f"{self._folder}: {name} differs from {other}, to which it is tied; {remedy}")
        self._repeated.add(name)

    def seal(self, description: str) -> str:
        """Return the fingerprint of the loaded tensors. Call it after all tensors have been loaded.

        The fingerprint has sixteen hex digits. It is a hash of each loaded tensor, the dtype and quantisation, and
        `description`. `description` must cover all other settings that affect the KV. Raises ModelError if a tensor
        that could change the model's output was not loaded.
        """
        left = self._file_by_name.keys() - self._digests.keys() - self._repeated
        unknown = sorted(name for name in left if not name.endswith(_HARMLESS) and not self._is_unused(name))
        if unknown:
            remedy = "config.json describes another model; use the one that belongs to the weights"
            raise ModelError(f"{self._folder}: {len(unknown)} unknown tensors, the first is {unknown[0]}; {remedy}")
        format = f"{self.dtype}/int8" if self.int8 else str(self.dtype)
        if self._weight_format is not None:
            format = f"{format}/{self._weight_format}"
        total = xxhash.xxh3_64(f"{format}/{description}".encode())
        for name in sorted(self._digests):
            total.update(f"{name}={self._digests[name]};".encode())
        return total.hexdigest()

    def stored(self, name: str, allowed: Shapes) -> Tensor:
        """Load the tensor `name` as it is stored, without conversion, and record it as loaded. Raises ModelError if the
        tensor is missing or its dtype and shape are not in `allowed`."""
        path = self._file_by_name.get(name)
        if path is None:
            raise ModelError(f"{self._folder}: tensor {name} is missing; {self._remedy(name)}")
        with _opened(path) as file:
            tensor = file.get_tensor(name)
        if tensor.dtype not in allowed:
            remedy = f"use weights in {', '.join(TORCH_DTYPES)}, or a GGUF file"
            raise self.error(name, f"has type {tensor.dtype}, not {' or '.join(map(str, allowed))}", remedy)
        if tuple(tensor.shape) not in allowed[tensor.dtype]:
            shapes = " or ".join(str(list(shape)) for shape in allowed[tensor.dtype])
            remedy = "use the config.json that belongs to the weights"
            raise self.error(name, f"has shape {list(tensor.shape)}, config.json asks for {shapes}", remedy)
        self._digests[name] = _digest(tensor)
        return tensor

    def error(self, name: str, problem: str, remedy: str) -> ModelError:
        """Return a ModelError about the tensor `name`. The message contains the tensor's file, the problem and the
        remedy."""
        return ModelError(f"{self._file_by_name[name]}: tensor {name} {problem}; {remedy}")

    def _remedy(self, name: str) -> str:
        """Return the remedy for a missing tensor, as text for an error."""
        module = name.removesuffix(".weight")
        packed = [f"{module}.{part}" for part in _PACKED if self.has(f"{module}.{part}")]
        if name.endswith(".weight") and packed:
            return f"{packed[0]} exists: use the config.json whose quantization_config belongs to the weights"
        return "download the model again"

    def _fill(self, part: Tensor, name: str) -> None:
        """Copy the tensor `name` into `part`, which has the same shape. Dequantise it if it is quantised."""
        shape = tuple(part.shape)
        weight = None
        if self._weight_format is not None and len(shape) == 2:
            weight = self._weight_format.weight(name.removesuffix(".weight"), shape, self)
        if weight is None:
            part.copy_(self.stored(name, {dtype: [shape] for dtype in TORCH_DTYPES.values()}))
            return
        num_rows = max(_PART_ELEMENTS // shape[1] // _PART_ROWS, 1) * _PART_ROWS
        for start in range(0, shape[0], num_rows):
            stop = min(start + num_rows, shape[0])
            part[start:stop].copy_(weight.rows(start, stop))
        self.num_dequantised += 1

    def _is_unused(self, name: str) -> bool:
        """Return whether a tensor that was not loaded belongs to a quantised checkpoint and does not
        affect the model."""
        if self._weight_format is None:
            return False
        kind = self._weight_format.unused_kind(name)
        if kind is None and name.endswith(".bias"):  # tools give every layer a bias: zero if the model has none
            with _opened(self._file_by_name[name]) as file:
                kind = None if file.get_tensor(name).any() else "biases of zero"
        if kind is not None:
            self.num_unused[kind] += 1
        return kind is not None

    @contextmanager
    def _allocating(self) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, AssertionError) as error:  # torch without CUDA asserts
            reason = str(error).partition("\n")[0]
            remedy = "choose another device, a smaller dtype or a smaller model"
            raise ModelError(
                f"{self._folder}: cannot allocate on device {str(self.device)!r} ({reason}); {remedy}"
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
    others = sorted(path.name for path in folder.glob("*.safetensors"))  # AutoGPTQ names its file by bits and groups
    remedy = f"rename {others[0]} to {single.name}" if len(others) == 1 else "download the model again"
    raise ModelError(f"{folder}: holds no {single.name} and no {index.name}; {remedy}")


def _tensor_names(path: Path) -> list[str]:
    with _opened(path) as file:
        return list(file.keys())


@contextmanager
def _opened(path: Path) -> Iterator[_TensorFile]:
    """Yield the file, memory-mapped. Its header and length are checked each time it is opened."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path}: cannot be read ({error}); it may be truncated: download it again") from error


def _digest(tensor: Tensor) -> str:
    return f"{tensor.dtype}{list(tensor.shape)}{xxhash.xxh3_64_hexdigest(byte_view(tensor.flatten()))}"
