"""How much prefill a step may take beside rows that decode, so that these are not kept waiting much longer.

A step that decodes B rows whose sequences have C tokens in sum, and prefills beside them, takes about

    base + B row + C token    what decoding alone would take
    + work * rate             a token's way through the matrices is one unit of work, and so are the pairs of queries
                              and keys that take as many FLOPs

The first line is fitted to the latest steps that only decoded, some of each batch size, so that it holds for sizes that
were not seen for a while; the rate follows the latest steps that prefilled: what such a step took, over what it was
predicted to take with its decoding, scales it by a part.

Step 8 of a request's way (DESIGN.md, section 4). Owned by the engine's thread; knows no clock: it is told what steps
took.
"""

import math
from collections import deque
from dataclasses import dataclass

import numpy as np

from baton.types import TokenRange
from modeling.forward.model_config import ModelConfig
from planning.fit import fit_relative
from planning.model_shape import ModelShape

_KEPT_STEPS = 8
"""Latest steps kept of each batch size."""
_GAIN = 0.2
"""How far one step moves the rate towards what it says."""
_MOST_OVER = 2.0
"""Times the predicted seconds: a step that took longer counts as this, for something else may have held it up."""
_LEAST_SHARE = 0.05
"""Of a step that prefilled, what prefill is taken for at least, at first: a rate of nothing could not be scaled."""
_MOST_MIXED = 32
"""Steps that did both, after which one only decodes: the former do not tell how their time divides."""


@dataclass(frozen=True)
class Decoding:
    """What of a step decodes."""

    num_rows: int
    num_tokens: int
    """That these rows attend to, in sum."""


NO_DECODING = Decoding(0, 0)


@dataclass(frozen=True)
class PrefillWork:
    """What prefilling some tokens of a sequence takes, in units of a token's way through the matrices."""

    pair_work: float = 0.0
    """Of a pair of query and key."""

    @classmethod
    def of_model(cls, config: ModelConfig) -> "PrefillWork":
        """By its FLOPs."""
        shape = ModelShape(
            num_layers=config.num_layers,
            hidden=config.hidden_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            ffn=config.intermediate_size,
            vocab=config.vocab_size,
        )
        return cls(shape.pair_flops / shape.linear_flops)

    def of(self, tokens: TokenRange) -> float:
        """Of a chunk, which attends to itself and to all before it."""
        num_pairs = len(tokens) * tokens.start + len(tokens) * (len(tokens) + 1) / 2
        return len(tokens) + self.pair_work * num_pairs

    def num_fitting(self, start: int, most: float) -> int:
        """How many tokens from `start` on come to no more work than `most`, which is finite."""
        linear, square = 1 + self.pair_work * (start + 0.5), self.pair_work / 2
        root = math.sqrt(linear * linear + 4 * square * max(most, 0.0))
        return int(2 * max(most, 0.0) / (root + linear))


class StepBound:
    """Learns what steps take, and bounds their prefill: one with rows that decode takes at most `max_stretch` times
    what decoding alone would."""

    def __init__(self, max_stretch: float) -> None:
        assert max_stretch >= 1
        self._max_stretch = max_stretch
        self._decoded: dict[int, deque[tuple[Decoding, float]]] = {}
        """Of steps that only decoded, by batch size."""
        self._fit: tuple[float, float, float] | None = None
        """Seconds of base, row and token; None: to be fitted anew."""
        self._rate_s: float | None = None
        """Seconds of a unit of work; None: nobody knows."""
        self._num_mixed = 0
        """Steps that did both since the latest one that only decoded."""

    def decode_s(self, decoding: Decoding) -> float | None:
        """Predicted seconds of a step that only decodes; None before one did."""
        if not self._decoded:
            return None
        if self._fit is None:
            self._fit = self._fitted()
        base_s, row_s, token_s = self._fit
        return base_s + decoding.num_rows * row_s + decoding.num_tokens * token_s

    def prefill_s(self, work: float) -> float | None:
        """Predicted seconds that so much prefill adds to a step; None before there was some."""
        return None if self._rate_s is None else work * self._rate_s

    def max_work(self, decoding: Decoding) -> float:
        """Units of prefill that the next step may take: as many as there are where no row decodes, and none as long as
        nothing is known; without a bound, any."""
        if not decoding.num_rows or self._max_stretch == math.inf:
            return math.inf
        decode_s = self.decode_s(decoding)
        if decode_s is None or self._rate_s is None:
            return 0.0
        return (self._max_stretch - 1) * decode_s / self._rate_s

    def is_to_decode_alone(self, decoding: Decoding) -> bool:
        """Whether the next step is to prefill nothing, so that decoding stays known while there is always something to
        prefill: after many steps that did both, and at the first of more rows than have ever decoded alone. Never twice
        in a row."""
        if not self._num_mixed or not decoding.num_rows or not self._decoded or self._max_stretch == math.inf:
            return False
        is_unseen = decoding.num_rows > max(self._decoded)
        return self._num_mixed >= (1 if is_unseen else _MOST_MIXED)

    def observe(self, decoding: Decoding, work: float, seconds: float) -> None:
        """A step took that long."""
        if decoding.num_rows:
            self._num_mixed = self._num_mixed + 1 if work else 0
        if seconds <= 0:
            return
        if not work:
            self._keep(decoding, seconds)
            return
        decode_s = self.decode_s(decoding) if decoding.num_rows else 0.0
        if decode_s is None:  # rows came while others prefilled: nothing else tells yet what they take
            decode_s = max(seconds - (self.prefill_s(work) or 0.0), seconds / 2)
            self._keep(decoding, decode_s)
        if self._rate_s is None:
            self._rate_s = max(seconds - decode_s, _LEAST_SHARE * seconds) / work
        else:
            over = seconds / (decode_s + work * self._rate_s)
            self._rate_s *= 1 + _GAIN * (min(over, _MOST_OVER) - 1)

    def _keep(self, decoding: Decoding, seconds: float) -> None:
        latest = self._decoded.setdefault(decoding.num_rows, deque(maxlen=_KEPT_STEPS))
        latest.append((decoding, seconds))
        self._fit = None

    def _fitted(self) -> tuple[float, float, float]:
        steps = [each for latest in self._decoded.values() for each in latest]
        columns = np.array([(1, each.num_rows, each.num_tokens) for each, _ in steps], np.float64)
        (base_s, row_s, token_s), _ = fit_relative(columns, np.array([seconds for _, seconds in steps]))
        return base_s, row_s, token_s
