"""Settings of a worker process that do not depend on its role: model, node and cluster. They are sent to the process as
JSON."""

from dataclasses import field
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from baton.settings.base import ByteRate, Bytes, Count, settings
from baton.types import DeviceName, Dtype, KernelChoice, WeightForm

LOOPBACK = "127.0.0.1"
"""Loopback address, which only processes on the same machine can reach."""

LogFormat = Literal["text", "json"]

Cores = Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(strict=False)]
"""Indices of CPU cores. May be given as a tuple or a list."""


@settings
class ModelFormats:
    """Number formats of a model's weights, activations and KV."""

    dtype: Dtype = "bfloat16"
    """Number format of weights, activations and KV: "bfloat16" or "float32"."""
    weights: WeightForm = "stored"
    """Form of weights in memory: "stored" (quantised as in the checkpoint), "bfloat16", or "int8" (changes outputs)."""


@settings
class PrefixRoom:
    """Limits of a node's prefix cache, which stores the KV of earlier prompts."""

    prefix_share: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Fraction of each node's /dev/shm for the prefix cache, which stores the KV of earlier prompts. 0: no cache."""
    prefix_disk_bytes: Bytes = 0
    """Maximum bytes on each node's disk (model.cache) for KV that does not fit into /dev/shm, like "20GiB". 0: none."""


@settings
class EmulatedLink:
    """The link between host memory and the memory of an emulated device."""

    link: ByteRate = 0
    """Link bandwidth of emulated devices in bytes/s per direction, like "25GBps". 0: speed of a memory copy."""
    link_latency_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Latency in seconds of a transfer over an emulated device's link, added to the time for its bytes."""


@settings
class LogLines:
    """Format of the log lines of a cluster's processes."""

    log_format: LogFormat = "text"
    """Format of log lines: "text", or "json" for one JSON object per line, with the request's id if there is one."""


@settings
class WorkerPlace(ModelFormats, PrefixRoom, EmulatedLink, LogLines):
    """Settings of a worker process that do not depend on its role: its model, node and cluster."""

    model_folder: Path = field(kw_only=True)
    """Hugging Face folder of the model. It is already downloaded and converted."""
    model: str = ""
    """Name for finding or downloading the model if a node has no folder of it. Empty: the worker then fails."""
    model_search: tuple[Path, ...] = ()
    """Folders in which a folder named like `model_folder` is searched, if a node has no `model_folder` itself."""
    host: str = LOOPBACK
    """Address that the worker's servers bind to and that other processes connect to. Empty: the node's own address."""
    device: DeviceName = "cpu"
    """Device on which the worker computes."""
    gpu_share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Fraction of a GPU that Ray gives a worker on cuda. Used only to identify the device."""
    num_threads: Annotated[int, Field(ge=0)] = 1
    """Number of threads that the process computes with. 0: one thread for each core of the machine."""
    cores: Cores = ()
    """Indices of the CPU cores that the process is pinned to. Empty: the process is not pinned."""
    cluster: str = ""
    """Name of the cluster. Workers of the same cluster on the same node share a prefix store."""
    prefix_disk: str = ""
    """Folder on the node's disk for cached prefixes that do not fit into /dev/shm. Empty: no disk is used."""
    num_engines: Count = 1
    """Number of generation engines in the cluster. By default, they share a machine's free memory equally."""
    kernels: tuple[KernelChoice, ...] = ()
    """Kernels chosen by the launcher, for the type of its processor. Workers on other types choose their own."""
    secret: str = field(default="", repr=False)
    """Secret of the cluster, which callers of the worker must send. Required: a worker without it does not start."""
    crash_note: str = ""
    """Path of the process's crash note, a file that the process itself creates. Empty: no crash note."""
