"""How much prefill a step may take beside rows that decode, so that these are not kept waiting much longer.

Such a step takes at most a multiple of what decoding alone takes, or some seconds where these are more. Once in a while
steps may take longer, if these seconds end all prefills that wait: streams are then slow for a moment, and not in each
of many steps. Beside rows that gave no more than their first token only its tokens bound a step: no reader has seen
text flow yet that could stall.

A step that decodes B rows whose sequences have C tokens in sum, and prefills beside them, takes about

    step + B token + C key    what decoding alone would take
    + work * rate             a token's way through the matrices is one unit of work, and so are the pairs of queries
                              and keys that take as many FLOPs

Where rows have drafts, decoding alone is a round: the steps that draft, and more tokens and pairs in the step that
verifies (`planning.work_cost`). Steps of a draft model are not such work: their predicted seconds are added. The next
round is expected to have as many drafts a row as the latest.

The first line is fitted to the latest steps that only decoded, some of each batch size, so that it holds for sizes that
were not seen for a while. The rate follows the latest steps that prefilled: the time of such a step, divided by the
predicted time of it with its decoding, scales the rate by a part.

`decode_first` asks for the bound and reports the time of each step. Owned by the engine's thread; has no clock.
"""

import math
from collections import deque
from dataclasses import dataclass, replace

from baton.types import TokenRange
from generate_workers.engine.model_shape import model_shape
from modeling.forward.model_config import ModelConfig
from planning.fit import fit_work
from planning.work_cost import NO_WORK, StepWork, WorkCost

_KEPT_STEPS = 8
"""Latest steps kept of each batch size."""
_GAIN = 0.2
"""Part of a step's deviation from its prediction by which the rate moves."""
_MOST_OVER = 2.0
"""Largest factor over the predicted seconds that counts: a longer step was perhaps held up by something else."""
_LEAST_SHARE = 0.05
"""Least part of a step's time that counts as prefill in the first step that prefills, and as the model's own beside
steps of a draft model: a rate or cost of zero could not be scaled."""
_REFILL = 0.05
"""Part of the time by which streams' patience for a longer step comes back."""
_MOST_MIXED = 32
"""Number of mixed steps, whose time cannot be divided between the two, after which one step only decodes."""


@dataclass(frozen=True)
class Decoding:
    """The decoding part of a step."""

    num_rows: int
    num_tokens: int
    """Tokens that the decode rows attend to, in sum."""
    drafts: StepWork = NO_WORK
    """Work that drafts add: their verifying, and the steps of the model itself that make them."""
    draft_model_s: float = 0.0
    """Predicted seconds of the draft steps of another model, whose costs are not those of this one."""
    is_streaming: bool = True
    """Whether one of the rows has given more than one token, so that a pause would be noticed."""

    @property
    def work(self) -> StepWork:
        """Return all work of the model in the round: of drafting, and of the step that verifies."""
        return StepWork.plain(self.num_rows, self.num_tokens) + self.drafts

    def drafting_as(self, other: "Decoding") -> "Decoding":
        """Return these rows with as many drafts a row as `other`, which has some rows."""
        share, drafts = self.num_rows / other.num_rows, other.drafts
        tokens, keys, pairs = (round(share * part) for part in (drafts.num_tokens, drafts.num_keys, drafts.num_pairs))
        added = StepWork(tokens, keys, pairs, drafts.num_steps)
        return replace(
            self, drafts=added, draft_model_s=other.draft_model_s
        )  # mostly of reading weights, which rows share


NO_DECODING = Decoding(0, 0)


@dataclass(frozen=True)
class PrefillWork:
    """Work of prefilling tokens of a sequence, in units of one token's way through the matrices."""

    pair_work: float = 0.0
    """Work of one pair of query and key."""

    @classmethod
    def of_model(cls, config: ModelConfig) -> "PrefillWork":
        """Derive the work of a pair from the model's FLOPs."""
        shape = model_shape(config, dtype_bytes=2)  # which does not matter to FLOPs
        return cls(shape.pair_flops / shape.linear_flops)

    def of(self, tokens: TokenRange) -> float:
        """Return the work of a chunk, which attends to itself and to all tokens before it."""
        num_pairs = len(tokens) * tokens.start + len(tokens) * (len(tokens) + 1) / 2
        return len(tokens) + self.pair_work * num_pairs

    def num_fitting(self, start: int, most: float) -> int:
        """Return how many tokens from `start` on take no more work than `most`, which is finite."""
        linear, square = 1 + self.pair_work * (start + 0.5), self.pair_work / 2
        root = math.sqrt(linear * linear + 4 * square * max(most, 0.0))
        return int(2 * max(most, 0.0) / (root + linear))


class StepBound:
    """Learns what steps take, and bounds their prefill: a step with rows that decode takes at most `max_stretch` times
    as long as decoding alone would, or `mixed_step_s`, whichever is longer. Steps may be longer still, by
    `burst_step_s` in sum, if that ends all prefills that wait, and then not again before that time has been regained.
    With `burst_step_s`, rows that gave one token at most bound nothing."""

    def __init__(self, max_stretch: float, mixed_step_s: float = 0.0, burst_step_s: float = 0.0) -> None:
        assert max_stretch >= 1 and mixed_step_s >= 0 and burst_step_s >= 0
        self._max_stretch = max_stretch
        self._mixed_step_s = mixed_step_s
        self._burst_step_s = burst_step_s
        self._patience_s = burst_step_s
        """What is left of `burst_step_s`."""
        self._decoded: dict[int, deque[tuple[Decoding, float]]] = {}
        """Latest steps that only decoded, with their seconds, by batch size."""
        self._fit: WorkCost | None = None
        """Seconds of decoding. None: to be fitted anew."""
        self._latest: Decoding | None = None
        """The decoding part of the latest step with any."""
        self._rate_s: float | None = None
        """Seconds of a unit of work. None before a step has prefilled."""
        self._num_mixed = 0
        """Steps with both decoding and prefill since the latest step that only decoded."""

    def decode_s(self, decoding: Decoding) -> float | None:
        """Return the predicted seconds of a step that only decodes, with its drafts; None before such a step was
        observed."""
        if not self._decoded:
            return None
        if self._fit is None:
            self._fit = self._fitted()
        return self._fit.seconds(decoding.work) + decoding.draft_model_s

    def prefill_s(self, work: float) -> float | None:
        """Return the predicted seconds that so much prefill adds to a step; None before a step has prefilled."""
        return None if self._rate_s is None else work * self._rate_s

    def expected_s(self, decoding: Decoding, work: float) -> float:
        """Return roughly the seconds of a step, without a fit: as the latest with as many rows, and the prefill beside
        it; 0 while nothing is known."""
        alike = self._decoded.get(decoding.num_rows)
        return (alike[-1][1] if alike else 0.0) + (self.prefill_s(work) or 0.0)

    def max_work(self, decoding: Decoding, waiting: float = math.inf) -> float:
        """Return the units of prefill that the next step may take, whose drafts are not planned yet: infinity where no
        row decodes, without a bound, and with bursts where no row streams yet or the `waiting` units, which are those
        of all prefills, end soon enough; 0 while nothing is known of decoding or of prefill."""
        is_bounded = decoding.num_rows and self._max_stretch < math.inf
        if not is_bounded or self.may_burst(decoding):
            return math.inf
        decode_s = self.decode_s(decoding if self._latest is None else decoding.drafting_as(self._latest))
        if decode_s is None or self._rate_s is None:
            return 0.0
        if waiting * self._rate_s <= self._patience_s:
            return math.inf
        return (self._bound_s(decode_s) - decode_s) / self._rate_s

    def may_burst(self, decoding: Decoding) -> bool:
        """Return whether the prefills of prompts that came together may be one step, whatever it takes: with bursts,
        while no row streams."""
        return self._burst_step_s > 0 and not decoding.is_streaming

    def is_to_decode_alone(self, decoding: Decoding) -> bool:
        """Return whether the next step should only decode, so that decoding stays known: after many mixed steps, and
        with more rows than ever decoded alone. Never True twice in a row."""
        if not self._num_mixed or not decoding.num_rows or not self._decoded or self._max_stretch == math.inf:
            return False
        is_unseen = decoding.num_rows > max(self._decoded)
        return self._num_mixed >= (1 if is_unseen else _MOST_MIXED)

    def observe(self, decoding: Decoding, work: float, seconds: float) -> None:
        """Learn from a step that ran `decoding` and `work` and took `seconds`."""
        if decoding.num_rows:
            self._num_mixed = self._num_mixed + 1 if work else 0
            self._latest = decoding
        self._regain(decoding, work, seconds)
        if seconds <= 0:
            return
        if not work:
            self._keep(decoding, seconds)
            return
        decode_s = self.decode_s(decoding) if decoding.num_rows else 0.0
        if decode_s is None:  # rows came while others prefilled: no step has told yet what decoding takes
            decode_s = max(seconds - (self.prefill_s(work) or 0.0), seconds / 2)
            self._keep(decoding, decode_s)
        if self._rate_s is None:
            self._rate_s = max(seconds - decode_s, _LEAST_SHARE * seconds) / work
        else:
            over = seconds / (decode_s + work * self._rate_s)
            self._rate_s *= 1 + _GAIN * (min(over, _MOST_OVER) - 1)

    def _bound_s(self, decode_s: float) -> float:
        """Return the most seconds of a step that prefills beside rows whose decoding alone takes `decode_s`."""
        return max(self._max_stretch * decode_s, self._mixed_step_s)

    def _regain(self, decoding: Decoding, work: float, seconds: float) -> None:
        """Take from the streams' patience what a step took beyond its bound, and give back for its time. Where no row
        streams, none remembers a pause."""
        if not decoding.num_rows or not decoding.is_streaming:
            self._patience_s = self._burst_step_s
            return
        decode_s = self.decode_s(decoding) if work else None
        over_s = 0.0 if decode_s is None else seconds - self._bound_s(decode_s)
        left_s = self._patience_s - max(over_s, 0.0) + _REFILL * max(seconds, 0.0)
        self._patience_s = min(max(left_s, 0.0), self._burst_step_s)

    def _keep(self, decoding: Decoding, seconds: float) -> None:
        latest = self._decoded.setdefault(decoding.num_rows, deque(maxlen=_KEPT_STEPS))
        latest.append((decoding, seconds))
        self._fit = None

    def _fitted(self) -> WorkCost:
        steps = [
            (each.work, max(seconds - each.draft_model_s, _LEAST_SHARE * seconds))
            for latest in self._decoded.values()
            for each, seconds in latest
        ]
        return fit_work(steps, WorkCost(0.0, 0.0, 0.0, 0.0))[0]
