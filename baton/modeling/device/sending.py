"""Copies small tensors, such as the inputs of a step, from host memory to a device without waiting for it."""

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a copy of `tensor` on `device`, or the tensor itself if it is on that device. A copy from the host to a
    GPU takes its turn on the current CUDA stream, and the host does not wait for the work before it."""
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)  # torch reuses pinned memory only after the copy
