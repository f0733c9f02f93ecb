"""Limits prefill in steps that also decode (mixed steps), so that decoding sequences are delayed only a little.

A mixed step may take a multiple of the time that decoding alone takes, or `mixed_step_s` seconds if that is more. Mixed
steps have an allowance, `burst_step_s` seconds in total, by which they may exceed this limit. A step may use the
allowance only if all waiting prefills fit into it. Streams are then slow for a moment instead of in many steps. If
`burst_step_s` is not 0 and no decoding sequence has more than one output token, only the number of tokens limits a
step, because no client reads a continuous text yet.

The predicted time of a mixed step, which decodes B sequences with C tokens in total, is

    step + B * token + C * key    time of decoding alone
    + work * rate                 time of prefill; one unit of work is the FLOPs of one token without attention, and
                                  query-key pairs are converted to this unit by their FLOPs

If there are drafts, "decoding alone" means a round: the draft steps, and the step that verifies the drafts, which runs
more tokens and query-key pairs (`baton.planning.work_cost`). If a separate draft model makes the drafts, its steps are
predicted separately, and their seconds are added. The next round is expected to have as many drafts per sequence as the
latest round.

`step`, `token` and `key` are costs in seconds, fitted to the latest steps that only decoded. Some steps of each batch
size are kept, so that the fit also holds for sizes that have not occurred for a while. `rate` is the number of seconds
per unit of work. It is adjusted after each step that prefilled: if the step took x times its predicted time, `rate` is
multiplied by 1 + `_GAIN` * (x - 1).

`chunked_prefill` uses this module and reports the duration of each step. Owned by the engine's thread. The module does
not read a clock.
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
"""Number of latest steps that are kept for the fit, for each batch size."""
_GAIN = 0.2
"""Weight of the latest step that prefilled, when the rate of prefill (seconds per unit of work) is adjusted. If the
step took x times its predicted time, the rate is multiplied by 1 + `_GAIN` * (x - 1)."""
_MOST_OVER = 2.0
"""Maximum ratio of a step's measured time to its predicted time with which the rate of prefill is adjusted. Larger
ratios are reduced to this value, because something else may have delayed the step."""
_LEAST_SHARE = 0.05
"""Minimum of two costs, as a fraction of a step's measured time. Both costs are remainders. In the first step that
prefills, the cost of prefill is the step's time minus the time of decoding. If a draft model makes drafts, the cost of
the served model is the time of the draft steps and the verifying step, minus the time of the draft model's steps. The
minimum keeps both costs above zero, because later adjustments by a factor could not change a cost of zero."""
_REFILL = 0.05
"""Fraction of each step's seconds that is added to the allowance, up to its maximum `burst_step_s`. The allowance is
the time by which mixed steps (which decode and prefill) may exceed their limit."""
_MOST_MIXED = 32
"""Number of successive mixed steps after which one step only decodes. This step measures the time of decoding alone,
which cannot be measured in mixed steps."""


@dataclass(frozen=True)
class Decoding:
    """Decoding part of a step: the number of sequences that decode, and their work."""

    num_rows: int
    num_tokens: int
    """Total number of tokens to which all decoding sequences attend."""
    drafts: StepWork = NO_WORK
    """Additional work of the served model for drafts: verifying the drafts, and draft steps of the model itself."""
    draft_model_s: float = 0.0
    """Predicted seconds of the draft steps of a separate draft model. Their costs are measured separately."""
    is_streaming: bool = True
    """True if a sequence has produced more than one output token, so that its client would notice a pause."""

    @property
    def work(self) -> StepWork:
        """Total work of the served model: decoding, verifying drafts, and the draft steps that it runs itself. Steps of
        a separate draft model are not included."""
        return StepWork.plain(self.num_rows, self.num_tokens) + self.drafts

    def drafting_as(self, other: "Decoding") -> "Decoding":
        """Return a copy of this object with estimated drafts: as many drafts per sequence as in `other`, which must
        have at least one sequence."""
        share, drafts = self.num_rows / other.num_rows, other.drafts
        tokens, keys, pairs = (round(share * part) for part in (drafts.num_tokens, drafts.num_keys, drafts.num_pairs))
        added = StepWork(tokens, keys, pairs, drafts.num_steps)
        return replace(
            self, drafts=added, draft_model_s=other.draft_model_s
        )  # mostly the time of reading weights, which sequences share


NO_DECODING = Decoding(0, 0)


@dataclass(frozen=True)
class PrefillWork:
    """Converts prefill tokens of a sequence to work. The unit of work is the FLOPs of one token without attention."""

    pair_work: float = 0.0
    """Work of one query-key pair of attention, in units of the FLOPs of one token without attention."""

    @classmethod
    def of_model(cls, config: ModelConfig) -> "PrefillWork":
        """Return the PrefillWork of a model. The work of a query-key pair is computed from the model's FLOPs."""
        shape = model_shape(config, dtype_bytes=2)  # FLOPs do not depend on dtype_bytes
        return cls(shape.pair_flops / shape.linear_flops)

    def of(self, tokens: TokenRange) -> float:
        """Return the work of prefilling the chunk `tokens`. Its tokens attend to each other (causally) and to all
        earlier tokens."""
        num_pairs = len(tokens) * tokens.start + len(tokens) * (len(tokens) + 1) / 2
        return len(tokens) + self.pair_work * num_pairs

    def num_fitting(self, start: int, most: float) -> int:
        """Return the maximum number of tokens that can be prefilled from position `start` with at most `most` units of
        work. `most` must be finite."""
        linear, square = 1 + self.pair_work * (start + 0.5), self.pair_work / 2
        root = math.sqrt(linear * linear + 4 * square * max(most, 0.0))
        return int(2 * max(most, 0.0) / (root + linear))


class StepBound:
    """Predictor of step times, which limits prefill in steps that also decode (mixed steps).

    A mixed step takes at most `max_stretch` times as long as decoding alone would, or `mixed_step_s` seconds, whichever
    is longer. Mixed steps have an allowance, `burst_step_s` seconds in total, by which they may exceed this limit. A
    step may use the allowance only if the predicted time of all waiting prefills fits into it. The allowance refills
    slowly after use. If `burst_step_s` is not 0, mixed steps have no time limit until a decoding sequence has more than
    one output token.
    """

    def __init__(self, max_stretch: float, mixed_step_s: float = 0.0, burst_step_s: float = 0.0) -> None:
        assert max_stretch >= 1 and mixed_step_s >= 0 and burst_step_s >= 0
        self._max_stretch = max_stretch
        self._mixed_step_s = mixed_step_s
        self._burst_step_s = burst_step_s
        self._patience_s = burst_step_s
        """Remaining allowance in seconds by which mixed steps may exceed their limit. Its maximum is `burst_step_s`."""
        self._decoded: dict[int, deque[tuple[Decoding, float]]] = {}
        """Latest steps that only decoded, as pairs (decoding, seconds), by batch size."""
        self._fit: WorkCost | None = None
        """Cost of decoding, fitted to the kept steps. None: it must be computed again, because the kept steps have
        changed."""
        self._latest: Decoding | None = None
        """Decoding part of the latest step with decoding sequences. None until such a step has run."""
        self._rate_s: float | None = None
        """Seconds per unit of prefill work. The unit is the FLOPs of one token without attention (PrefillWork). None
        until a step has prefilled."""
        self._num_mixed = 0
        """Number of mixed steps since the latest step that only decoded."""

    def decode_s(self, decoding: Decoding) -> float | None:
        """Return the predicted seconds of a step that only decodes, including its drafts. Return None if no such step
        was observed yet."""
        if not self._decoded:
            return None
        if self._fit is None:
            self._fit = self._fitted()
        return self._fit.seconds(decoding.work) + decoding.draft_model_s

    def prefill_s(self, work: float) -> float | None:
        """Return the predicted seconds that `work` units of prefill add to a step. Return None if no step has prefilled
        yet."""
        return None if self._rate_s is None else work * self._rate_s

    def expected_s(self, decoding: Decoding, work: float) -> float:
        """Return a rough prediction of a step's duration in seconds. It is the duration of the latest step of the same
        batch size that only decoded, plus the predicted time of prefill. An unknown part counts as 0."""
        alike = self._decoded.get(decoding.num_rows)
        return (alike[-1][1] if alike else 0.0) + (self.prefill_s(work) or 0.0)

    def max_work(self, decoding: Decoding, waiting: float = math.inf) -> float:
        """Return the maximum prefill work of the next step, in units of PrefillWork. `waiting` is the work of all
        waiting prefills.

        The result is infinity if `max_stretch` is infinite, or if no sequence decodes. If `burst_step_s` is set, the
        result is also infinity in two more cases: if no sequence has more than one output token, or if the remaining
        allowance suffices to end all waiting prefills. The result is 0 while the cost of decoding or of prefill is not
        known. The drafts of the next step are not planned yet. As many drafts per sequence as in the latest step are
        assumed.
        """
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
        """Return True if one step may prefill all waiting prompts, regardless of its duration. This requires that
        `burst_step_s` is not 0, and that no sequence has more than one output token."""
        return self._burst_step_s > 0 and not decoding.is_streaming

    def is_to_decode_alone(self, decoding: Decoding) -> bool:
        """Return True if the next step should only decode, so that the cost of decoding is measured. This is the case
        after `_MOST_MIXED` successive mixed steps. It is also the case after one mixed step if more sequences decode
        now than in any earlier step that only decoded. It is never the case directly after a step that only decoded."""
        if not self._num_mixed or not decoding.num_rows or not self._decoded or self._max_stretch == math.inf:
            return False
        is_unseen = decoding.num_rows > max(self._decoded)
        return self._num_mixed >= (1 if is_unseen else _MOST_MIXED)

    def observe(self, decoding: Decoding, work: float, seconds: float) -> None:
        """Record the duration of a step, in seconds, to improve later predictions. The step decoded the sequences of
        `decoding`, and prefilled `work` units of work."""
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
