"""Cost model and group sizes of the simulated cluster.

`RecallingPlanner` is the orchestrator's planner (`ChainPlanner`) with a cache, because a simulation asks for the same
prompt lengths many times. Does no I/O.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from baton.errors import InvalidArgumentError
from baton.planning.hardware import ModelCosts
from baton.planning.planner import ChainPlanner
from baton.types import TokenRange

Chunks = tuple[TokenRange, ...]


class RecallingPlanner(ChainPlanner):
    """Planner of the orchestrator (`ChainPlanner`) that computes each prediction once and caches it. This is possible
    because its costs never change."""

    def __init__(self, nominal: ModelCosts, *, max_ranks: int, max_tokens: int) -> None:
        """Create a planner whose costs are fixed. The attribute `local` (configuration of prefill by generation groups)
        is initially None. As long as it is None, the times of such prefills are not predicted. See ChainPlanner for the
        parameters."""
        super().__init__(nominal, max_ranks=max_ranks, max_tokens=max_tokens)
        self._known_chunks: dict[tuple[int, int, int], Chunks] = {}
        self._known_ttft_s: dict[Chunks, float] = {}
        self._known_rank_s: dict[Chunks, tuple[float, ...]] = {}
        self._known_layer_s: dict[Chunks, float] = {}

    def chunks(self, tokens: TokenRange, num_ranks: int) -> Chunks:
        key = (tokens.start, tokens.end, num_ranks)
        if key not in self._known_chunks:
            self._known_chunks[key] = super().chunks(tokens, num_ranks)
        return self._known_chunks[key]

    def ttft_s(self, chunks: Sequence[TokenRange]) -> float:
        key = tuple(chunks)
        if key not in self._known_ttft_s:
            self._known_ttft_s[key] = super().ttft_s(chunks)
        return self._known_ttft_s[key]

    def rank_s(self, chunks: Sequence[TokenRange]) -> tuple[float, ...]:
        key = tuple(chunks)
        if key not in self._known_rank_s:
            self._known_rank_s[key] = super().rank_s(chunks)
        return self._known_rank_s[key]

    def layer_s(self, chunks: Sequence[TokenRange]) -> float:
        key = tuple(chunks)
        if key not in self._known_layer_s:
            self._known_layer_s[key] = super().layer_s(chunks)
        return self._known_layer_s[key]


@dataclass(frozen=True)
class GroupSizes:
    """Sizes of prefill and generation groups, and the seconds to start a group or to change its role. Raises
    InvalidArgumentError for an invalid field."""

    num_ranks: int = 1
    """Number of ranks of a prefill group."""
    num_slots: int = 32
    """Number of slots of a generation group."""
    cold_start_s: float = 30.0
    """Seconds from the decision to add a group until it serves. Includes process start, loading of weights, and
    warm-up."""
    flip_s: float = 2.0
    """Seconds that an idle group takes to change its role. Its weights stay loaded."""

    def __post_init__(self) -> None:
        for name, least in (("num_ranks", 1), ("num_slots", 1), ("cold_start_s", 0), ("flip_s", 0)):
            value = getattr(self, name)
            if not least <= value < float("inf"):
                raise InvalidArgumentError(f"{name} = {value} is out of range: use at least {least}")
