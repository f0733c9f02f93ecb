"""Measures the quality of a residency policy while the model reads a text (module `passages` in this folder):
perplexity, agreement with full attention, and selected keys.

Shape suffixes: B sequences, M steps, L layers, N heads, G kv heads, J = N / G query heads per kv head, H head dim, S
keys of a sequence, K maximum number of selected keys.
"""

import math
import statistics
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.modeling.forward.decoder import LayerTurns, SequenceSpan
from baton.modeling.forward.selection import Picks
from generate_workers.residency.port import StepKv


def perplexity(losses: Tensor) -> float:
    """Return the perplexity of tokens. `losses` are their negative log likelihoods."""
    return math.exp(losses.double().mean())


def compatibility(choices_BM: Tensor, reference_BM: Tensor) -> float:
    """Return the fraction of positions at which the token in `choices_BM` equals the token in `reference_BM`."""
    return float((choices_BM == reference_BM).double().mean())


def relative_cost(losses_BM: Tensor, reference_BM: Tensor) -> tuple[float, float]:
    """Return a pair: the relative increase of the perplexity compared with the reference on the same tokens, and its
    standard error. Both arguments are negative log likelihoods. Sequences count as independent samples, but tokens of
    one sequence do not. With only one sequence, the standard error is NaN."""
    gap_B = (losses_BM - reference_BM).double().mean(1)
    ratio = math.exp(gap_B.mean())
    error = float(gap_B.std()) / math.sqrt(len(gap_B)) if len(gap_B) > 1 else math.nan
    return ratio - 1, ratio * error


class PicksMeter:
    """Meter that counts the keys that sequences attend to, over all steps that it observes. It counts only the layers
    in which the policy selects keys. None of these layers has a sliding window."""

    def __init__(self) -> None:
        self.weighs = False
        """True while the softmax weight of the selected keys under full attention is measured, which is slow."""
        self._shares: list[float] = []
        self._masses: list[float] = []

    @property
    def picked_share(self) -> float | None:
        """Mean fraction of a sequence's keys to which a kv head attended. Only layers in which keys were selected
        count. None if no layer selected keys."""
        return statistics.fmean(self._shares) if self._shares else None

    @property
    def mass(self) -> float | None:
        """Mean fraction of full attention's softmax weight that belongs to the selected keys. None if it was not
        measured."""
        return statistics.fmean(self._masses) if self._masses else None

    def watch(self, step: StepKv) -> "WatchedTurns | None":
        """Return a wrapper of the step's LayerTurns (the residency policy's hooks before and after each layer) that
        reports the selected keys to this meter. Return None if the step has no LayerTurns. Each sequence of the step
        must have exactly one new token."""
        return None if step.turns is None else WatchedTurns(self, step, step.turns)

    def take(self, layer: int, picks: Picks, step: StepKv, q_BNH: Tensor) -> None:
        """Record the keys `picks` that were selected in one layer of a step. `q_BNH` are the queries that selected
        them."""
        lengths_B = torch.tensor([span.tokens.end for span in step.spans])
        self._shares.append(float((picks.num_BG / lengths_B.unsqueeze(1)).mean()))
        if self.weighs:
            rows = enumerate(step.spans)
            parts = [_picked_weight(picks, row, q_BNH[row], _keys(span, layer)) for row, span in rows]
            self._masses.append(statistics.fmean(parts))


@dataclass(frozen=True)
class WatchedTurns:
    """Wrapper of a step's LayerTurns (the policy's hooks before and after each layer). It forwards all calls to the
    wrapped object, and reports the selected keys to a meter."""

    meter: PicksMeter
    step: StepKv
    turns: LayerTurns
    """The step's LayerTurns: the residency policy's hooks before and after each layer. All calls are forwarded to
    them."""

    def begin(self, layer: int, hidden_TD: Tensor) -> None:
        """Call `self.turns.begin`, the residency policy's hook for the beginning of `layer`."""
        self.turns.begin(layer, hidden_TD)

    def picks(self, layer: int, q_TNH: Tensor) -> Picks | None:
        """Return the keys that the residency policy selects for the queries `q_TNH` (`self.turns.picks`), and record
        these keys in the meter. None: the policy selects no keys, and all keys are attended to."""
        picks = self.turns.picks(layer, q_TNH)
        if picks is not None:
            self.meter.take(layer, picks, self.step, q_TNH)
        return picks

    def end(self, layer: int) -> None:
        """Call `self.turns.end`, the residency policy's hook for the end of `layer`."""
        self.turns.end(layer)


def _keys(span: SequenceSpan, layer: int) -> Tensor:
    """Return all keys of a span with one new token, `[S, G, H]`."""
    return torch.cat([rows.slice(0, span.tokens.end).k_SGH for rows in span.segments(layer)])


def _picked_weight(picks: Picks, row: int, q_NH: Tensor, k_SGH: Tensor) -> float:
    """Return the fraction of the softmax weight that belongs to the selected keys of one sequence, the mean over its
    heads."""
    _, num_kv_heads, head_dim = k_SGH.shape
    q_GJH = q_NH.float().view(num_kv_heads, -1, head_dim) * head_dim**-0.5
    weights_GJS = torch.softmax(q_GJH @ k_SGH.float().permute(1, 2, 0), -1)
    lists = zip(picks.keys_BGK[row], picks.num_BG[row].tolist(), strict=True)
    parts = [weights_GJS[head][:, keys_K[:num].long()].sum(1).mean() for head, (keys_K, num) in enumerate(lists)]
    return float(torch.stack(parts).mean())
