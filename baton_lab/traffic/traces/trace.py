"""A trace of requests: when each arrives, how long its prompt and its answer are, and which blocks begin its prompt.

Made by `baton_lab.traffic.traces.generators` or read by `baton_lab.traffic.traces.trace_files`; replayed by
`baton_lab.traffic.simulation`. Pure.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from baton.errors import InvalidArgumentError

MAX_TOKENS = 2**20
"""Longest prompt, and longest answer, of a request in a trace."""


@dataclass(frozen=True)
class Trace:
    """Requests in the order of their arrival: arrays of one length, one entry a request.

    Raises InvalidArgumentError for arrays of different lengths, arrivals that do not ascend from 0, and lengths outside
    of 1 to `MAX_TOKENS`.
    """

    name: str
    arrivals_s: NDArray[np.float64]
    """Seconds from the trace's beginning."""
    prompt_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    blocks: tuple[tuple[int, ...], ...] = ()
    """Ids of the blocks that each prompt consists of, equal for equal beginnings; empty: prompts share nothing."""
    block_tokens: int = 512
    """Tokens of a block."""

    def __post_init__(self) -> None:
        num_requests = len(self.arrivals_s)
        if not num_requests:
            raise InvalidArgumentError(f"trace {self.name}: it has no requests: give a longer or a busier one")
        arrays = {"prompt_tokens": self.prompt_tokens, "output_tokens": self.output_tokens}
        for name, values in arrays.items():
            if len(values) != num_requests:
                raise InvalidArgumentError(f"trace {self.name}: {len(values)} {name} for {num_requests} arrivals")
            if values.min() < 1 or values.max() > MAX_TOKENS:
                raise InvalidArgumentError(
                    f"trace {self.name}: {name} from {values.min()} to {values.max()} are out of range: "
                    f"use 1 to {MAX_TOKENS}"
                )
        if self.arrivals_s[0] < 0 or not np.all(np.diff(self.arrivals_s) >= 0) or not np.isfinite(self.arrivals_s[-1]):
            raise InvalidArgumentError(f"trace {self.name}: arrivals do not ascend from 0: sort the requests by time")
        if self.blocks and len(self.blocks) != num_requests:
            raise InvalidArgumentError(
                f"trace {self.name}: {len(self.blocks)} lists of blocks for {num_requests} arrivals"
            )

    def __len__(self) -> int:
        return len(self.arrivals_s)

    @property
    def duration_s(self) -> float:
        """Return the seconds from the trace's beginning to its last arrival."""
        return float(self.arrivals_s[-1])

    def faster(self, factor: float) -> "Trace":
        """Return the same requests, `factor` times as many a second."""
        return replace(self, arrivals_s=self.arrivals_s / factor)

    def first(self, num_requests: int) -> "Trace":
        """Return the trace's first requests, at most `num_requests` of them."""
        kept = slice(num_requests)
        return replace(
            self,
            arrivals_s=self.arrivals_s[kept],
            prompt_tokens=self.prompt_tokens[kept],
            output_tokens=self.output_tokens[kept],
            blocks=self.blocks[kept],
        )
