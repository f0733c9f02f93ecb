"""The cores and the number of threads that an engine's process computes with."""

from collections.abc import Sequence

import torch

from baton.process.cores import pin


def use_cores(cores: Sequence[int], num_threads: int) -> None:
    """Pin this process to `cores` and give torch `num_threads` threads. Call before the model is loaded."""
    pin(cores)
    torch.set_num_threads(num_threads)
