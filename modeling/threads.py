"""Which cores, and how many threads, an engine's process computes with."""

from collections.abc import Sequence

import torch

from baton.process.cores import pin


def use_cores(cores: Sequence[int], num_threads: int) -> None:
    """Pins this process to `cores` (`baton.process.cores.pin`) and gives torch `num_threads` threads. Called once,
    before the model is loaded."""
    pin(cores)
    torch.set_num_threads(num_threads)
