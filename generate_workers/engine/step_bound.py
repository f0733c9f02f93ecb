"""Limit on prefill in steps that also decode (mixed steps), so that decoding sequences do not wait much longer.

A mixed step takes at most a multiple of the time that decoding alone takes, or `mixed_step_s` seconds if that is more.
Steps may exceed this limit by `burst_step_s` seconds in total, if that ends all waiting prefills. Streams are then slow
for a moment instead of in many steps. If no decoding sequence has more than its first token, only the number of tokens
limits a step: no client has received a continuous text that could stall.

The predicted time of a step that decodes B sequences with C tokens in total, and also prefills, is

    step + B * token + C * key    time of decoding alone
    + work * rate                 one token's linear FLOPs are one unit of work, and so is the number of query-key pairs
                                  that needs the same number of FLOPs

With drafts, decoding alone is a round: the draft steps, and the further tokens and pairs in the step that verifies
(`baton.planning.work_cost`). Steps of a draft model are not part of that work: their predicted seconds are added. The
next round is expected to have the same number of drafts per sequence as the latest.

`step`, `token` and `key` are fitted to the latest steps that only decoded. Some steps of each batch size are kept, so
that the fit also holds for sizes that have not occurred for a while. `rate` is adjusted after each step that prefilled,
by a fraction of the relative deviation of the step's time from its predicted time, decoding included.

`chunked_prefill` uses the bound and reports the time of each step. Owned by the engine's thread; has no clock.
"""

import math
from collections import deque
from dataclasses import dataclass, replace

from baton.modeling.forward.model_config import ModelConfig
from baton.planning.fit import fit_work
from baton.planning.work_cost import NO_WORK, StepWork, WorkCost
from baton.types import TokenRange
from generate_workers.engine.model_shape import model_shape

_KEPT_STEPS = 8
"""Number of latest steps kept per batch size."""
_GAIN = 0.2
"""Fraction of a step's relative deviation from its prediction by which the rate is adjusted."""
_MOST_OVER = 2.0
"""Maximum ratio of measured to predicted seconds that is used; larger ratios are reduced to it, because something else
may have delayed the step."""
_LEAST_SHARE = 0.05
"""Minimum fraction of a step's time that counts as prefill in the first step that prefills, and as the model's own time
in a round with steps of a draft model. A rate or cost of zero could not be scaled."""
_REFILL = 0.05
"""Seconds by which the remaining `burst_step_s` grows per second of steps."""
_MOST_MIXED = 32
"""Number of mixed steps after which one step only decodes. It measures decoding alone, because the time of mixed steps
cannot be divided between decoding and prefill."""


@dataclass(frozen=True)
class Decoding:
    """Part of a step that decodes."""

    num_rows: int
    num_tokens: int
    """Total number of tokens that the decoding sequences attend to."""
    drafts: StepWork = NO_WORK
    """Work that drafts add: verifying them, and the steps of the model itself that make them."""
    draft_model_s: float = 0.0
    """Predicted seconds of the steps of a separate draft model, whose costs are tracked separately."""
    is_streaming: bool = True
    """True if a sequence has more than one output token, so that its reader would notice a pause."""

    @property
    def work(self) -> StepWork:
        """Return all work of the model in the round: its draft steps, and the step that verifies."""
        return StepWork.plain(self.num_rows, self.num_tokens) + self.drafts

    def drafting_as(self, other: "Decoding") -> "Decoding":
        """Return these sequences with the same number of drafts per sequence as `other`, which must have sequences."""
        share, drafts = self.num_rows / other.num_rows, other.drafts
        tokens, keys, pairs = (round(share * part) for part in (drafts.num_tokens, drafts.num_keys, drafts.num_pairs))
        added = StepWork(tokens, keys, pairs, drafts.num_steps)
        return replace(
            self, drafts=added, draft_model_s=other.draft_model_s
        )  # mostly the time of reading weights, which sequences share


NO_DECODING = Decoding(0, 0)


@dataclass(frozen=True)
class PrefillWork:
    """Work of prefilling tokens of a sequence, in units of one token's linear FLOPs."""

    pair_work: float = 0.0
    """Work of one query-key pair."""

    @classmethod
    def of_model(cls, config: ModelConfig) -> "PrefillWork":
        """Return a PrefillWork with the work of a query-key pair, derived from the model's FLOPs."""
        shape = model_shape(config, dtype_bytes=2)  # FLOPs do not depend on dtype_bytes
        return cls(shape.pair_flops / shape.linear_flops)

    def of(self, tokens: TokenRange) -> float:
        """Return the work of a chunk, which attends to itself and to all tokens before it."""
        num_pairs = len(tokens) * tokens.start + len(tokens) * (len(tokens) + 1) / 2
        return len(tokens) + self.pair_work * num_pairs

    def num_fitting(self, start: int, most: float) -> int:
        """Return the largest number of tokens from position `start` whose work is at most `most`, which is finite."""
        linear, square = 1 + self.pair_work * (start + 0.5), self.pair_work / 2
        root = math.sqrt(linear * linear + 4 * square * max(most, 0.0))
        return int(2 * max(most, 0.0) / (root + linear))


class StepBound:
    """Predictor of step times that limits prefill. A step that also decodes takes at most `max_stretch` times as long
    as decoding alone would, or `mixed_step_s` seconds, whichever is longer. If that ends all waiting prefills, steps
    may exceed this limit by `burst_step_s` seconds in total. This allowance refills slowly after use. If `burst_step_s`
    is not 0, sequences with at most one output token do not limit prefill."""

    def __init__(self, max_stretch: float, mixed_step_s: float = 0.0, burst_step_s: float = 0.0) -> None:
        assert max_stretch >= 1 and mixed_step_s >= 0 and burst_step_s >= 0
        self._max_stretch = max_stretch
        self._mixed_step_s = mixed_step_s
        self._burst_step_s = burst_step_s
        self._patience_s = burst_step_s
        """Remaining seconds of `burst_step_s`."""
        self._decoded: dict[int, deque[tuple[Decoding, float]]] = {}
        """Latest steps that only decoded, with their seconds, by batch size."""
        self._fit: WorkCost | None = None
        """Fitted cost of decoding. None: the fit is outdated."""
        self._latest: Decoding | None = None
        """Decoding part of the latest step that decoded."""
        self._rate_s: float | None = None
        """Seconds per unit of work. None before a step has prefilled."""
        self._num_mixed = 0
        """Number of mixed steps since the latest step that only decoded."""

    def decode_s(self, decoding: Decoding) -> float | None:
        """Return the predicted seconds of a step that only decodes, including its drafts. None if no such step was
        observed yet."""
        if not self._decoded:
            return None
        if self._fit is None:
            self._fit = self._fitted()
        return self._fit.seconds(decoding.work) + decoding.draft_model_s

    def prefill_s(self, work: float) -> float | None:
        """Return the predicted seconds that `work` units of prefill add to a step. None before a step has prefilled."""
        return None if self._rate_s is None else work * self._rate_s

    def expected_s(self, decoding: Decoding, work: float) -> float:
        """Return a rough prediction of a step's seconds, without a fit: the seconds of the latest decoding step of the
        same batch size, plus the predicted seconds of prefill. 0 if both are unknown."""
        alike = self._decoded.get(decoding.num_rows)
        return (alike[-1][1] if alike else 0.0) + (self.prefill_s(work) or 0.0)

    def max_work(self, decoding: Decoding, waiting: float = math.inf) -> float:
        """Return the units of prefill work that the next step may run, before its drafts are planned. `waiting`: units
        of all waiting prefills. Return infinity if no sequence decodes, or if there is no limit. With `burst_step_s`,
        also return infinity if no sequence streams yet, or if all `waiting` units end soon enough. Return 0 while the
        cost of decoding or of prefill is unknown."""
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
        """Return whether all waiting prefills may run in one step, regardless of its time: if `burst_step_s` is set,
        and no sequence streams."""
        return self._burst_step_s > 0 and not decoding.is_streaming

    def is_to_decode_alone(self, decoding: Decoding) -> bool:
        """Return whether the next step should only decode, to measure the cost of decoding: after many mixed steps, or
        after one mixed step if more sequences decode than in any step that only decoded. Never True for two consecutive
        steps."""
        if not self._num_mixed or not decoding.num_rows or not self._decoded or self._max_stretch == math.inf:
            return False
        is_unseen = decoding.num_rows > max(self._decoded)
        return self._num_mixed >= (1 if is_unseen else _MOST_MIXED)

    def observe(self, decoding: Decoding, work: float, seconds: float) -> None:
        """Learn from a step that ran `decoding` and `work` units of prefill and took `seconds` seconds."""
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
        if decode_s is None:  # no step has only decoded yet
            decode_s = max(seconds - (self.prefill_s(work) or 0.0), seconds / 2)
            self._keep(decoding, decode_s)
        if self._rate_s is None:
            self._rate_s = max(seconds - decode_s, _LEAST_SHARE * seconds) / work
        else:
            over = seconds / (decode_s + work * self._rate_s)
            self._rate_s *= 1 + _GAIN * (min(over, _MOST_OVER) - 1)

    def _bound_s(self, decode_s: float) -> float:
        """Return the maximum seconds of a mixed step whose decoding alone takes `decode_s` seconds."""
        return max(self._max_stretch * decode_s, self._mixed_step_s)

    def _regain(self, decoding: Decoding, work: float, seconds: float) -> None:
        """Deduct the seconds by which a step exceeded its limit from the remaining `burst_step_s`, and refill it in
        proportion to the step's time. If no sequence streams, refill it completely."""
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
