"""Predicts the memory that a worker takes, so that Ray can find a node for it. Reads headers of model files."""

from pathlib import Path

from deploy.config.cluster import ClusterConfig
from deploy.machine.calibrations import shape_of
from deploy.machine.doctor import WORKER_BYTES, weight_bytes
from deploy.machine.limits import tokens_of_slot


def worker_bytes(config: ClusterConfig, folder: Path) -> dict[str, int]:
    """Return the bytes of memory that a worker of each role takes: its process, all weights, and KV. A prefill rank
    holds the KV of one prompt of the greatest length. A generation engine holds `generate.kv_memory_bytes`, or if that
    is 0 (it follows the node's memory), at least the KV of one slot. Raises ModelError, and ConfigError for a bad
    file."""
    shape = shape_of(folder, config.model.dtype)
    slot = shape.num_layers * shape.kv_bytes * tokens_of_slot(folder, config.generate.max_slot_tokens)
    weights = WORKER_BYTES + weight_bytes(folder, config.model.dtype)
    drafts = weight_bytes(Path(config.generate.draft_model), config.model.dtype) if config.generate.draft_model else 0
    return {"prefill": weights + slot, "generate": weights + drafts + (config.generate.kv_memory_bytes or slot)}
