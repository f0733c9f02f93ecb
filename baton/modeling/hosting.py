"""Setup of a worker process: pins it to cores, loads the model, and locates the node's prefix store.

`prefill_workers.host` and `generate_workers.host` call these functions when a worker starts. A process that changes its
role calls them again for each role. All functions block.
"""

import logging
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from baton.modeling.checkpoints.weights import load_decoder
from baton.modeling.device.copying import LinkRate
from baton.modeling.device.making import make_device
from baton.modeling.forward.decoder import Decoder
from baton.modeling.forward.drawing import compile_draws
from baton.modeling.kernels import native
from baton.modeling.kernels.process_kernels import KERNELS
from baton.modeling.kernels.triton.prefill import compile_prefills
from baton.modeling.kv.buffers import BufferSpan
from baton.modeling.prefix_store.folder import allow_files, node_folder, share_bytes
from baton.modeling.prefix_store.node import DiskPlace, NodeStore
from baton.process.clock import Clock
from baton.process.cores import pin
from baton.settings.base import values_of
from baton.settings.place import EmulatedLink, WorkerPlace
from baton.types import KvLayout, TokenRange

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PrefixPlace:
    """Location and size of the store in which the workers of a node keep prefixes."""

    folder: Path
    """Folder of the store, on a file system in memory."""
    limit_bytes: int
    disk: DiskPlace | None = None

    def open(self, layout: KvLayout, clock: Clock, key: str) -> NodeStore:
        """Open the prefix store in `folder`, which the workers of this node share. `key` is the secret of these
        workers. Blocks. Raises ConfigError if `folder` cannot be created."""
        return NodeStore(self.folder, layout, limit_bytes=self.limit_bytes, clock=clock, disk=self.disk, key=key)


def use_cores(cores: Sequence[int], num_threads: int) -> None:
    """Pin this process to `cores`, and let torch use `num_threads` threads. Call it before the model is loaded and
    before the compute threads start."""
    pin(cores)
    torch.set_num_threads(num_threads)


@contextmanager
def _half_of(num_threads: int) -> Iterator[None]:
    """Give torch half of the threads inside the `with` block.

    Other processes of the cluster start while weights are copied, and OpenMP's threads spin while they wait for a
    thread whose core is busy. On two busy cores, loading a model with two threads took three times the processor time
    of loading it with one.
    """
    torch.set_num_threads(max(1, num_threads // 2))
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


class LoadedModel:
    """Model that a worker process has loaded. It stays loaded when the process changes its role. Not thread-safe."""

    def __init__(self) -> None:
        self._source: tuple[object, ...] | None = None
        """Settings with which the decoder was loaded: folder, number formats, device and emulated link. None: no
        decoder is loaded."""
        self._decoder: Decoder | None = None

    def load(self, place: WorkerPlace) -> Decoder:
        """Load the model that `place` describes, and return it. Before that, pin the process to cores and select the
        kernels of the process. A model that is already loaded with the same settings on the same device is not loaded
        again. Raises ModelError or ConfigError with a one-line message."""
        allow_files()
        num_threads = place.num_threads or os.cpu_count() or 1
        use_cores(place.cores, num_threads)
        KERNELS.use(place.kernels)
        source = place.model_folder, place.dtype, place.weights, place.device, values_of(EmulatedLink, place)
        if self._decoder is None or self._source != source:
            self._decoder = None  # freed first: memory may not suffice for two models
            device = make_device(place.device, LinkRate(place.link or math.inf, place.link_latency_s))
            formats = {"dtype": place.dtype, "weights": place.weights}
            with _half_of(num_threads):
                decoder = load_decoder(place.model_folder, **formats, device=device, shared=True)
            prepare_kernels(decoder)
            self._decoder, self._source = decoder, source
        return self._decoder


def prepare_kernels(decoder: Decoder) -> None:
    """Build or compile the kernels of a model now, so that the first token or prompt does not wait for them. The steps
    of a generation engine need further kernels (`generate_workers.compiling.compile_steps`)."""
    if decoder.weights.device.type == "cpu":
        native.load()
    elif decoder.has_triton_rows:
        compile_decoder(decoder)
    else:
        logger.warning(
            "Triton's kernels are not used: torch's are several times slower, and no steps run as CUDA graphs; install "
            "Triton (`pip install 'baton-serve[cuda]'`), and use bfloat16, float16 or float32"
        )


@torch.inference_mode()
def compile_decoder(decoder: Decoder) -> None:
    """Compile the Triton kernels with which a decoder computes prompts whose KV is in buffers, and draws tokens: norms,
    gates, RoPE, attention and sampling. Triton compiles a kernel when it is launched for the first time with arguments
    of a new kind, such as another dtype, which takes about a second. The decoder must have Triton kernels."""
    config = decoder.config
    heads = config.num_heads, config.num_kv_heads, config.head_dim
    has_windows = any(window is not None for window in config.windows)
    compile_prefills(heads, decoder.dtype, decoder.weights.device, with_masks=has_windows)
    tokens = TokenRange(0, 1)
    span = BufferSpan(decoder.device.buffer(decoder.layout, tokens), tokens)
    compile_draws(decoder.logits(decoder.forward([0], [span])))


def prefix_place(place: WorkerPlace) -> PrefixPlace | None:
    """Return the location of the prefix store on this node. None: the cluster's workers store no prefixes. Raises
    ConfigError if the file system in memory cannot be used."""
    if not place.prefix_share:
        return None
    return PrefixPlace(node_folder(place.cluster), share_bytes(place.prefix_share), _disk(place))


def _disk(place: WorkerPlace) -> DiskPlace | None:
    if not place.prefix_disk_bytes:
        return None
    return DiskPlace(node_folder(place.cluster, Path(place.prefix_disk)), place.prefix_disk_bytes)
