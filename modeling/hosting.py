"""What a worker of either role does in the process that hosts it: loads its model, and finds its node's prefixes.

`prefill_workers.host` and `generate_workers.host` call these when a worker starts: once in a process, or once for each
role that it has in turn. All block.
"""

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypedDict

import torch

from baton.process.cores import pin
from baton.settings.base import values_of
from baton.settings.place import EmulatedLink, WorkerPlace
from modeling.checkpoints.weights import load_decoder
from modeling.device.copying import LinkRate
from modeling.device.making import make_device
from modeling.forward.decoder import Decoder
from modeling.kernels import native
from modeling.kernels.process_kernels import KERNELS
from modeling.kernels.triton.prefill import compile_prefills
from modeling.prefix_store.folder import allow_files, node_folder, share_bytes
from modeling.prefix_store.node import DiskPlace


class PrefixOptions(TypedDict):
    """Where a worker's server keeps prefixes, as the arguments of its start."""

    prefix_folder: Path | None
    """Folder in memory; None: no prefixes are kept."""
    prefix_bytes: int
    prefix_disk: DiskPlace | None


def use_cores(cores: Sequence[int], num_threads: int) -> None:
    """Pin this process to `cores` and give torch `num_threads` threads. Call before the model is loaded, and before the
    threads start that compute."""
    pin(cores)
    torch.set_num_threads(num_threads)


@contextmanager
def _half_of(num_threads: int) -> Iterator[None]:
    """Give torch half of the threads in the block. Other processes of the cluster start while weights are copied, and
    OpenMP's threads wait busily for one whose core is taken: on two busy cores, two threads took three times the
    processor time of one to load a model."""
    torch.set_num_threads(max(1, num_threads // 2))
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


class LoadedModel:
    """The model that a process has loaded, which stays loaded while one server after another uses it. Owned by the
    process; not thread-safe."""

    def __init__(self) -> None:
        self._source: tuple[object, ...] | None = None
        """Folder, number formats and device of the decoder."""
        self._decoder: Decoder | None = None

    def load(self, place: WorkerPlace) -> Decoder:
        """Pin the process as its place says, choose its kernels, and return the model, which is loaded unless it is
        there already, on the same device. Raises ModelError or ConfigError, in one line."""
        allow_files()
        num_threads = place.num_threads or os.cpu_count() or 1
        use_cores(place.cores, num_threads)
        KERNELS.use(place.kernels)
        source = place.model_folder, place.dtype, place.quantization, place.device, values_of(EmulatedLink, place)
        if self._decoder is None or self._source != source:
            self._decoder = None  # first: there may be no memory for two
            device = make_device(place.device, LinkRate(place.link or math.inf, place.link_latency_s))
            formats = {"dtype": place.dtype, "quantization": place.quantization}
            with _half_of(num_threads):
                self._decoder = load_decoder(place.model_folder, **formats, device=device)
            self._source = source
            _prepare_kernels(self._decoder)
        return self._decoder


def _prepare_kernels(decoder: Decoder) -> None:
    """Build or compile kernels now that the first token, or the first prompt, would have to wait for."""
    config = decoder.config
    if decoder.weights.device.type == "cpu":
        native.load()
    elif decoder.has_triton_rows:
        heads = config.num_heads, config.num_kv_heads, config.head_dim
        has_windows = any(window is not None for window in config.windows)
        compile_prefills(*heads, decoder.dtype, decoder.weights.device, with_masks=has_windows)


def prefix_options(place: WorkerPlace) -> PrefixOptions:
    """Return where a cluster's workers keep prefixes on this node. Raises ConfigError without such a file system."""
    if not place.prefix_share:
        return {"prefix_folder": None, "prefix_bytes": 0, "prefix_disk": None}
    return {
        "prefix_folder": node_folder(place.cluster),
        "prefix_bytes": share_bytes(place.prefix_share),
        "prefix_disk": _disk(place),
    }


def _disk(place: WorkerPlace) -> DiskPlace | None:
    if not place.prefix_disk_bytes:
        return None
    return DiskPlace(node_folder(place.cluster, Path(place.prefix_disk)), place.prefix_disk_bytes)
