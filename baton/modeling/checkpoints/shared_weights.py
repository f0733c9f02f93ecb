"""Stores the weights of a model, as the kernels read them, in one file, which all workers of a node map.

The first worker loads the checkpoint and writes the file. It and all later workers map the file, so that the node's
memory contains the weights once, and a worker that starts does not convert them. `baton.modeling.checkpoints.weights`
calls this module, in any process. It blocks.

If the machine has several NUMA nodes, each of them on which workers are bound has a file of its own. The system stores
the pages of a file on the NUMA node of the thread that writes or first reads them, so workers read weights from the
memory of their own NUMA node.

The file begins with a JSON line (`_Header`), followed by the pickled `DecoderWeights`, in which each tensor is replaced
by its place, and the bytes of the tensors. Only what `baton.modeling` defines, and the names in `_GLOBALS`, is
unpickled. Each host has files of its own, because several may use one cache folder.
"""

import dataclasses
import fcntl
import io
import json
import logging
import math
import mmap
import os
import pickle
import platform
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash
from torch import Tensor

from baton.modeling.forward.decoder import DecoderWeights
from baton.modeling.kernels import native
from baton.modeling.kernels.huge_pages import WEIGHTS
from baton.modeling.kernels.process_kernels import KERNELS
from baton.modeling.kv.buffers import byte_view
from baton.process.topology import node_of, read_nodes, usable_cpus
from baton.process.whole_files import whole
from baton.settings.paths import cache_folder

logger = logging.getLogger(__name__)

LEAST_BYTES = 32 << 20
"""Checkpoints with fewer bytes are loaded by each worker, because they need little time and memory."""
_ALIGNMENT = 64
_GLOBALS = {
    *(("torch", name) for name in ("device", "float16", "bfloat16", "float32", "int8", "uint8", "int64")),
    *(("torch.nn.functional", "relu"), ("torch._C._nn", "gelu"), ("functools", "partial")),
}
"""Modules and names, other than those of `baton.modeling`, that a file may refer to."""
_DAMAGES = (
    *(pickle.UnpicklingError, EOFError, ImportError, ValueError, TypeError, LookupError),
    *(AttributeError, RuntimeError),
)
"""Exceptions that damaged data raises when it is unpickled."""
_MODELING = Path(__file__).parents[1]


class Loaded(NamedTuple):
    """Weights, and how they were loaded."""

    weights: DecoderWeights
    account: str = ""
    """Line for the log that describes how quantised weights were loaded. Empty: the weights are not quantised."""


@dataclass(frozen=True)
class _Header:
    """First line of a file."""

    made_of: str
    """Hash of all that determines the content. A file with another hash is replaced."""
    host: str
    folder: str
    """Folder of the checkpoint. The file can be removed when the folder does not exist any more."""
    account: str
    pickle_bytes: int
    data_start: int
    """Offset of the first tensor's bytes."""
    file_bytes: int


def shared_weights(folder: Path, form: str, load: Callable[[], Loaded]) -> Loaded:
    """Return the weights that `load` returns, in memory that all processes of the node share, or those that are bound
    to the same NUMA node as the calling thread. `form`: text that distinguishes the forms in which the weights of
    `folder` can be loaded.

    If the file in the cache folder is missing, outdated or damaged, call `load` and write the file. Other processes
    wait meanwhile. If it cannot be written, or the weights are small, return what `load` returns.
    """
    where, host = folder.resolve(), platform.node()
    name = xxhash.xxh3_64_hexdigest(f"{host}/{where}/{form}".encode())
    node = node_of(usable_cpus(), read_nodes())
    path = cache_folder() / "weights" / f"{where.name}-{name}{'' if node is None else f'-node{node}'}"
    lock, made_of = None, ""
    try:
        files = sorted(folder.glob("*.safetensors"))
        num_bytes = sum(each.stat().st_size for each in files)
        if num_bytes >= LEAST_BYTES:
            made_of = _made_of([*files, folder / "config.json"], form)
            path.parent.mkdir(parents=True, exist_ok=True)
            _require_room(path, num_bytes)
            lock = path.with_name(f"{path.name}.lock").open("w")
    except OSError as error:
        _warn_not_shared(path, error)
    if lock is None:
        return load()
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the kernel releases it if this process dies
        if (found := _map(path, made_of)) is not None:
            return found
        loaded = load()
        try:
            _remove_useless(path, host)
            _write(path, _Header(made_of, host, str(where), loaded.account, 0, 0, 0), loaded.weights)
        except OSError as error:
            _warn_not_shared(path, error)
            return loaded
        WEIGHTS.release()  # else this process would keep the last extent of what was loaded
        return _map(path, made_of) or loaded


def _warn_not_shared(path: Path, error: OSError) -> None:
    logger.warning("%s: weights cannot be shared (%s); each worker has its own", path, error)


def _require_room(path: Path, num_bytes: int) -> None:
    """Raise OSError if the disk has too little space for a file of `num_bytes` bytes, and as much again for others."""
    if not path.exists() and shutil.disk_usage(path.parent).free < 2 * num_bytes:
        raise OSError(f"{num_bytes >> 20} MiB need twice as much free disk space")


def _made_of(files: list[Path], form: str) -> str:
    """Return a hash of a checkpoint's files, the kernels for which weights are packed, and the code that packs them."""
    stats = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    choice = dataclasses.asdict(KERNELS.choice), native.chosen_set()
    return xxhash.xxh3_64_hexdigest(repr((stats, form, choice, _code(), torch.__version__)).encode())


@cache
def _code() -> str:
    sources = sorted(path for kind in ("py", "h") for path in _MODELING.rglob(f"*.{kind}"))
    return xxhash.xxh3_64_hexdigest(b"".join(path.read_bytes() for path in sources))


class _TensorPickler(pickle.Pickler):
    """Pickler that replaces each tensor by its place, dtype and shape."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self._places: dict[int, tuple[int, str, list[int]]] = {}
        self.tensors: list[tuple[int, Tensor]] = []
        """Each tensor, with its offset from the first tensor's bytes."""
        self.num_bytes = 0
        """Offset, from the first tensor's bytes, behind the last tensor."""

    def persistent_id(self, obj: object) -> Any:
        if not isinstance(obj, Tensor):
            return None
        if id(obj) not in self._places:
            self._places[id(obj)] = self.num_bytes, str(obj.dtype).removeprefix("torch."), list(obj.shape)
            self.tensors.append((self.num_bytes, obj))
            self.num_bytes += max(math.ceil(obj.nbytes / _ALIGNMENT), 1) * _ALIGNMENT  # places must differ
        return self._places[id(obj)]


class _Reader(pickle.Unpickler):
    """Unpickler that returns tensors at their places in `data`."""

    def __init__(self, file: io.BytesIO, data: Tensor) -> None:
        super().__init__(file)
        self._data = data
        self._tensors: dict[int, Tensor] = {}

    def persistent_load(self, pid: Any) -> Tensor:
        start, dtype_name, shape = pid
        if start not in self._tensors:
            dtype: torch.dtype = getattr(torch, dtype_name)
            num_bytes = math.prod(shape) * dtype.itemsize
            self._tensors[start] = self._data[start : start + num_bytes].view(dtype).view(shape)
        return self._tensors[start]

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name) if "." not in name and self._may_load(module, name) else None
        if found is None or ((module, name) not in _GLOBALS and found.__module__ != module):
            raise pickle.UnpicklingError(f"{module}.{name} is not allowed in a file of weights")
        return found

    @staticmethod
    def _may_load(module: str, name: str) -> bool:
        return module.startswith("baton.modeling.") or (module, name) in _GLOBALS


def _write(path: Path, header: _Header, weights: DecoderWeights) -> None:
    """Write the file. The header's sizes are set here."""
    pickled = io.BytesIO()
    writer = _TensorPickler(pickled)
    writer.dump(weights)
    _require_room(path, writer.num_bytes)
    longest = len(json.dumps(dataclasses.asdict(header))) + 64
    start = math.ceil((longest + pickled.tell()) / mmap.PAGESIZE) * mmap.PAGESIZE
    sizes = {"pickle_bytes": pickled.tell(), "data_start": start, "file_bytes": start + writer.num_bytes}
    with whole(path) as partial, partial.open("wb") as file:
        file.write(json.dumps(dataclasses.asdict(header) | sizes).encode() + b"\n")
        file.write(pickled.getvalue())
        for place, tensor in writer.tensors:
            file.seek(start + place)
            file.write(byte_view(tensor.contiguous().flatten()))
        file.truncate(start + writer.num_bytes)
        file.flush()
        os.fsync(file.fileno())  # a crash of the host must not leave a complete file with zeros in it


def _map(path: Path, made_of: str) -> Loaded | None:
    """Return the weights in a file, mapped. None: the file does not exist, or its content is outdated or damaged."""
    header = _header(path)
    if header is None or header.made_of != made_of or header.file_bytes != path.stat().st_size:
        return None
    with path.open("rb") as file:
        file.readline()
        pickled = file.read(header.pickle_bytes)
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # shared with other processes until written
    data = torch.frombuffer(mapping, dtype=torch.uint8)[header.data_start :]
    try:
        weights = _Reader(io.BytesIO(pickled), data).load()
    except _DAMAGES as error:
        logger.warning("%s: is damaged and is written again (%s)", path, error)
        return None
    assert isinstance(weights, DecoderWeights), path
    logger.info("%s: mapped %d MiB of weights", path, len(data) >> 20)
    return Loaded(weights, header.account)


def _header(path: Path) -> _Header | None:
    try:
        with path.open("rb") as file:
            return _Header(**json.loads(file.readline()))
    except (FileNotFoundError, ValueError, TypeError):  # TypeError: the fields of another version
        return None


def _remove_useless(path: Path, host: str) -> None:
    """Remove what killed processes left of this file, and files of this host whose checkpoint does not exist any
    more."""
    for each in path.parent.iterdir():
        if each.suffix == ".partial":
            is_useless = each.name.startswith(f"{path.name}.")
        else:
            header = None if each.suffix == ".lock" else _header(each)
            is_useless = header is not None and header.host == host and not Path(header.folder).exists()
        if is_useless:
            each.unlink(missing_ok=True)
