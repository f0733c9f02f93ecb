"""Settings of a worker's process that do not depend on its role: model, node and cluster. Values are sent as JSON."""

from dataclasses import field
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from baton.settings.base import ByteRate, Bytes, Count, settings
from baton.types import DeviceName, Dtype, KernelChoice, Quantization

LOOPBACK = "127.0.0.1"
"""Address that only processes of the same machine can reach."""

LogFormat = Literal["text", "json"]

Cores = Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(strict=False)]
"""Numbers of cores; a list may be given as well."""


@settings
class ModelFormats:
    """Number formats of a model."""

    dtype: Dtype = "bfloat16"
    """Number format of weights, activations and KV: bfloat16 or float32."""
    quantization: Quantization = "none"
    """Quantization of weights: none, or int8, which halves the bytes that a step reads and changes answers slightly."""


@settings
class PrefixRoom:
    """Space of a node for the KV of earlier prompts."""

    prefix_share: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Fraction of each node's /dev/shm for KV of earlier prompts, reused by prompts that begin alike; 0: none."""
    prefix_disk_bytes: Bytes = 0
    """Bytes of each node's disk, in model.cache, for KV that /dev/shm has no room for, like "20GiB"; 0: none."""


@settings
class EmulatedLink:
    """The link between host memory and the memory of an emulated device."""

    link: ByteRate = 0
    """Bytes a second in each direction, like "25GBps"; 0: as fast as the machine copies."""
    link_latency_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Seconds that a transfer takes in addition to the time for its bytes."""


@settings
class LogLines:
    """Format of the log lines of a cluster's processes."""

    log_format: LogFormat = "text"
    """Form of a line: text, or json: an object, which names its request if it has one."""


@settings
class WorkerPlace(ModelFormats, PrefixRoom, EmulatedLink, LogLines):
    """Settings of a worker's process: its model, node and cluster."""

    model_folder: Path = field(kw_only=True)
    """Hugging Face folder, already resolved and converted."""
    model: str = ""
    """Name by which a node that lacks `model_folder` finds the model itself; empty: such a node cannot serve."""
    model_search: tuple[Path, ...] = ()
    """Folders in which such a node looks for one named like `model_folder` first."""
    host: str = LOOPBACK
    """Address that the worker's server and links bind to, and others reach them at; empty: its node's own."""
    device: DeviceName = "cpu"
    """Where the worker computes."""
    num_threads: Annotated[int, Field(ge=0)] = 1
    """Threads that the process computes with; 0: one for each core of its machine."""
    cores: Cores = ()
    """Cores that the process is pinned to; empty: not pinned."""
    cluster: str = ""
    """Name of the cluster whose workers on one node share a prefix store."""
    prefix_disk: str = ""
    """Folder of the node for prefixes that have no room in /dev/shm."""
    num_engines: Count = 1
    """Generation engines of the cluster, among which a machine's free memory is divided for default limits of KV."""
    kernels: tuple[KernelChoice, ...] = ()
    """Kernels that the launcher chose for its kind of processor; workers on other kinds choose their own."""
    secret: str = field(default="", repr=False)
    """Secret of the worker's cluster, which its callers must know; a worker without one does not start."""
    step_times: str = ""
    """File of measured step times, by which an engine plans drafts to begin with; empty or missing: nominal costs."""
    crash_note: str = ""
    """File of the process's crash note, which the process itself makes; empty: it has none."""
