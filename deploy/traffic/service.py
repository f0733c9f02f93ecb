"""What the simulated cluster is made of: one cost model, and the sizes of groups.

`RecallingPlanner` is the production planner that keeps its answers, because a trace asks for the same lengths again and
again. Pure.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from baton.errors import InvalidArgumentError
from baton.types import TokenRange
from planning.planner import ChainPlanner

T = TypeVar("T")


class RecallingPlanner(ChainPlanner):
    """A planner whose costs never change, so that each prediction is made once."""

    _recalled: dict[Hashable, object]

    def chunks(self, tokens: TokenRange, num_ranks: int) -> tuple[TokenRange, ...]:
        known = self._known()
        key = (0, tokens.start, tokens.end, num_ranks)
        if key not in known:
            known[key] = super().chunks(tokens, num_ranks)
        return known[key]  # type: ignore[return-value]

    def ttft_s(self, chunks: Sequence[TokenRange]) -> float:
        known, key = self._known(), (1, *chunks)
        if key not in known:
            known[key] = super().ttft_s(chunks)
        return known[key]  # type: ignore[return-value]

    def rank_s(self, chunks: Sequence[TokenRange]) -> tuple[float, ...]:
        known, key = self._known(), (2, *chunks)
        if key not in known:
            known[key] = super().rank_s(chunks)
        return known[key]  # type: ignore[return-value]

    def layer_s(self, chunks: Sequence[TokenRange]) -> float:
        known, key = self._known(), (3, *chunks)
        if key not in known:
            known[key] = super().layer_s(chunks)
        return known[key]  # type: ignore[return-value]

    def _known(self) -> dict[Hashable, object]:
        if "_recalled" not in self.__dict__:
            self._recalled = {}
        return self._recalled


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
