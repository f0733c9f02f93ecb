"""Parts of the simulated cluster: one cost model, and the sizes of groups.

`RecallingPlanner` is the production planner that keeps its answers, because a trace queries the same lengths again and
again. Pure.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from baton.errors import InvalidArgumentError
from baton.planning.calibration import Calibration
from baton.planning.planner import ChainPlanner
from baton.planning.step_times import StepTimes
from baton.types import TokenRange

Chunks = tuple[TokenRange, ...]


class RecallingPlanner(ChainPlanner):
    """A planner whose costs never change, so that each prediction is made once."""

    def __init__(self, calibration: Calibration, *, max_ranks: int, max_tokens: int, steps: StepTimes) -> None:
        """Search knots as the planner does. Generation groups do not prefill by themselves."""
        super().__init__(calibration, max_ranks=max_ranks, max_tokens=max_tokens, steps=steps)
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
    """The sizes of groups, and the seconds in which they begin to serve. Raises InvalidArgumentError on a bad field."""

    num_ranks: int = 1
    """Ranks of a prefill group."""
    num_slots: int = 32
    """Slots of a generation group."""
    cold_start_s: float = 30.0
    """Seconds from the order for a new group until it serves: process, weights, warming up."""
    flip_s: float = 2.0
    """Seconds in which an idle group takes the other role, its weights loaded."""

    def __post_init__(self) -> None:
        for name, least in (("num_ranks", 1), ("num_slots", 1), ("cold_start_s", 0), ("flip_s", 0)):
            value = getattr(self, name)
            if not least <= value < float("inf"):
                raise InvalidArgumentError(f"{name} = {value} is out of range: use at least {least}")
