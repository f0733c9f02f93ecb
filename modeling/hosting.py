"""What a worker of either role does in the process that hosts it: loads its model, and finds its node's prefixes.

`prefill_workers.host` and `generate_workers.host` call these once, when a worker starts. All block.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

import torch

from baton.process.cores import pin
from baton.settings.place import WorkerPlace
from modeling.checkpoints.weights import load_decoder
from modeling.forward.decoder import Decoder
from modeling.kernels.process_kernels import KERNELS
from modeling.prefix_store.folder import allow_files, node_folder, share_bytes, sweep
from modeling.prefix_store.node import DiskPlace


class PrefixOptions(TypedDict):
    """Where a worker's server keeps prefixes, as the arguments of its start."""

    prefix_folder: Path | None
    """Folder in memory; None: no prefixes are kept."""
    prefix_bytes: int
    prefix_disk: DiskPlace | None


def use_cores(cores: Sequence[int], num_threads: int) -> None:
    """Pin this process to `cores` and give torch `num_threads` threads. Call before the model is loaded."""
    pin(cores)
    torch.set_num_threads(num_threads)


def load(place: WorkerPlace) -> Decoder:
    """Pin the process as its place says, choose its kernels, and load the model. Raises ModelError, in one line."""
    allow_files()
    use_cores(place.cores, place.num_threads or os.cpu_count() or 1)
    KERNELS.use(place.kernels)
    return load_decoder(place.model_folder, dtype=place.dtype, quantization=place.quantization)


def prefix_options(place: WorkerPlace) -> PrefixOptions:
    """Return where a cluster's workers keep prefixes on this node. Raises ConfigError without such a file system."""
    if not place.prefix_share:
        return {"prefix_folder": None, "prefix_bytes": 0, "prefix_disk": None}
    return {
        "prefix_folder": node_folder(place.cluster),
        "prefix_bytes": share_bytes(place.prefix_share),
        "prefix_disk": _disk(place),
    }


def sweep_node(place: WorkerPlace) -> None:
    """Remove what killed clusters left on this node. To be called once this cluster's own folders are in use."""
    sweep()
    disk = _disk(place)
    if disk is not None:
        sweep(disk.folder.parent)


def _disk(place: WorkerPlace) -> DiskPlace | None:
    if not place.prefix_disk_bytes:
        return None
    return DiskPlace(node_folder(place.cluster, Path(place.prefix_disk)), place.prefix_disk_bytes)
