"""Computes the fraction of the attention weight that selected keys have. A basis projects queries and keys to R
columns, from which attention scores are estimated. `baton prepare` uses the fraction to compare bases without
generating tokens.

A softmax over all keys gives each key a weight. The total weight of the selected keys is the *captured mass*. The
weight of the other keys is missing from the layer's output. The captured mass is computed from one run over a text, for
queries at some positions and all earlier keys.

Shape suffixes: Q examined queries, S keys, N query heads, G kv heads, J = N / G query heads per kv head, H head dim, R
columns of a basis.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.modeling.forward.selection import Selection
from baton.modeling.sparse.bases import Basis, LayerSample


@dataclass(frozen=True)
class Captured:
    """Result of a selection of keys: how much of the attention weight the selected keys have, and how many keys are
    selected. Values are means over queries, heads, and the layers in which keys are selected."""

    mass: float
    """Fraction of the softmax weight that falls on the selected keys. The weights of all keys add up to 1."""
    share: float
    """Fraction of the visible keys that are selected."""


@dataclass(frozen=True)
class Guess:
    """Method of selecting keys: by the true attention scores, or by scores that a basis estimates. A basis projects
    queries and keys to a few columns, from which the scores are estimated."""

    basis: Basis | None
    """Basis that estimates the scores of the keys from a few columns of the projected queries and keys. None: the true
    scores are used, which give the best possible selection of a given number of keys."""
    lookahead: int
    selection: Selection


def captured(
    samples: Iterable[LayerSample], guesses: Sequence[Guess], positions_Q: Tensor, windows: Sequence[int | None]
) -> list[Captured]:
    """Return, for each method of selecting keys in `guesses`, the fraction of the attention weight that the selected
    keys have and the fraction of the keys that are selected. Values are means over the queries at `positions_Q`.
    `samples` has the queries and keys of each layer. `windows` has the sliding window of each layer, or None for a
    layer without a sliding window."""
    found = torch.zeros(len(guesses), 2, dtype=torch.float64)
    num_layers = 0
    for sample in samples:
        seen_QS = _seen(positions_Q, len(sample.k_TGH), windows[sample.layer])
        q_QNH = sample.q_TNH[positions_Q].float() * sample.q_TNH.shape[-1] ** -0.5
        scores_GJQS = _scores(q_QNH, sample.k_TGH.float()).masked_fill_(~seen_QS, -torch.inf)
        true_GQS, weights_GQS = closeness(scores_GJQS), scores_GJQS.softmax(-1).mean(1)
        for number, guess in enumerate(guesses):
            close_GQS = true_GQS if guess.basis is None else _guessed(sample, guess, guess.basis, positions_Q, seen_QS)
            chosen_GQS = choose(close_GQS, positions_Q, seen_QS, guess.selection)
            mass = (weights_GQS * chosen_GQS).sum(-1).mean()
            share = (chosen_GQS.sum(-1) / seen_QS.sum(-1)).mean()
            found[number] += torch.stack([mass, share])
        num_layers += 1
    return [Captured(mass, share) for mass, share in (found / num_layers).tolist()]


def closeness(scores_GJQS: Tensor) -> Tensor:
    """Return the closeness of each key as `[G, Q, S]`. For a query head, the closeness of a key is its score minus the
    highest score of all keys, so it is at most 0. For a kv head, it is the maximum over the kv head's J query heads."""
    return (scores_GJQS - scores_GJQS.amax(-1, keepdim=True)).amax(1)


def choose(close_GQS: Tensor, positions_Q: Tensor, seen_QS: Tensor, selection: Selection) -> Tensor:
    """Return the keys that `baton.modeling.forward.selection` would select, as a bool mask `[G, Q, S]`. `close_GQS` has
    the closeness of each key as `closeness` returns it: the key's score minus the highest score. `positions_Q` has the
    positions of the queries. `seen_QS` is True where a query may attend to a key."""
    num_seen_Q = seen_QS.sum(-1)
    num_close_Q = (close_GQS > -selection.alpha).logical_and_(seen_QS).sum(-1).double().mean(0).ceil()
    most_Q = (num_seen_Q * selection.most_share).floor().clamp_(min=selection.free_keys)
    num_Q = num_close_Q.minimum(most_Q).clamp_(min=1)
    best_GQS = close_GQS.sort(dim=-1, descending=True, stable=True).indices
    ranks_S = torch.arange(close_GQS.shape[-1])
    is_best_GQS = (ranks_S < num_Q.unsqueeze(1)).expand(close_GQS.shape)
    chosen_GQS = torch.zeros(close_GQS.shape, dtype=torch.bool).scatter_(-1, best_GQS, is_best_GQS)
    always_QS = (ranks_S < selection.num_first) | (ranks_S > positions_Q.unsqueeze(1) - selection.num_last)
    return (chosen_GQS | always_QS) & seen_QS


def _guessed(sample: LayerSample, guess: Guess, basis: Basis, positions_Q: Tensor, seen_QS: Tensor) -> Tensor:
    q_TNH = sample.early_TNH if guess.lookahead else sample.q_TNH
    q_QNR = basis.queries(sample.layer, q_TNH[positions_Q])
    scores_GJQS = _scores(q_QNR, basis.keys(sample.layer, sample.k_TGH))
    return closeness(scores_GJQS.masked_fill_(~seen_QS, -torch.inf))


def _scores(q_QNX: Tensor, k_SGX: Tensor) -> Tensor:
    """Return attention scores `[G, J, Q, S]`, computed from all columns X of queries and keys."""
    num_queries, num_heads, num_columns = q_QNX.shape
    num_kv_heads = k_SGX.shape[1]
    q_QGJX = q_QNX.reshape(num_queries, num_kv_heads, num_heads // num_kv_heads, num_columns)
    q_GJQX = q_QGJX.permute(1, 2, 0, 3)
    return q_GJQX @ k_SGX.permute(1, 2, 0).unsqueeze(1)


def _seen(positions_Q: Tensor, num_keys: int, window: int | None) -> Tensor:
    at_S = torch.arange(num_keys)
    seen_QS = at_S <= positions_Q.unsqueeze(1)
    return seen_QS if window is None else seen_QS & (at_S > positions_Q.unsqueeze(1) - window)
