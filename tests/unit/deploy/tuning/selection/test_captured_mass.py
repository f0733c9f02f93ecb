"""What a selection captures, by its definition: one query, one head and one key at a time."""

import math

import pytest
import torch
from torch import Tensor

from baton.modeling.forward.selection import Selection
from baton.modeling.sparse.bases import Basis, BasisKind, LayerSample, fit_layer
from deploy.tuning.selection.captured_mass import Captured, Guess, captured

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, NUM_TOKENS = 4, 2, 8, 40
LAYERS = (2, 3)
WHOLE = (None,) * 4
POSITIONS = torch.tensor([0, 5, 17, 39])


def noise(*shape: int, seed: int) -> Tensor:
    return 2 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def samples() -> list[LayerSample]:
    return [
        LayerSample(
            layer,
            q_TNH=noise(NUM_TOKENS, NUM_HEADS, HEAD_DIM, seed=layer),
            early_TNH=noise(NUM_TOKENS, NUM_HEADS, HEAD_DIM, seed=10 + layer),
            k_TGH=noise(NUM_TOKENS, NUM_KV_HEADS, HEAD_DIM, seed=20 + layer),
        )
        for layer in LAYERS
    ]


@pytest.fixture(scope="module")
def basis(samples: list[LayerSample]) -> Basis:
    shape = (4, NUM_KV_HEADS, HEAD_DIM, 3)
    basis = Basis(BasisKind.CENTRED, torch.zeros(shape), torch.zeros(shape))
    for sample in samples:
        basis.q_LGHR[sample.layer], basis.k_LGHR[sample.layer] = fit_layer(
            basis.kind, sample.q_TNH, sample.k_TGH, basis.num_columns
        )
    return basis


def naive(samples: list[LayerSample], guess: Guess, window: int | None) -> Captured:
    masses, shares = [], []
    for sample in samples:
        for t in POSITIONS.tolist():
            seen = range(0 if window is None else max(0, t - window + 1), t + 1)
            closeness = [close(sample, guess, t, list(seen), g) for g in range(NUM_KV_HEADS)]
            counts = [sum(each > -guess.selection.alpha for each in row.values()) for row in closeness]
            most = max(math.floor(guess.selection.most_share * len(seen)), guess.selection.free_keys)
            num = max(1, min(math.ceil(sum(counts) / NUM_KV_HEADS), most))
            for g, row in enumerate(closeness):
                chosen = set(sorted(seen, key=lambda j, row=row: -row[j])[:num])  # type: ignore[misc]
                chosen |= {j for j in seen if j < guess.selection.num_first or j > t - guess.selection.num_last}
                shares.append(len(chosen) / len(seen))
                for n in (2 * g, 2 * g + 1):
                    scores = [float(sample.q_TNH[t, n] @ sample.k_TGH[j, g]) / math.sqrt(HEAD_DIM) for j in seen]
                    weights = dict(zip(seen, torch.tensor(scores).softmax(0).tolist(), strict=True))
                    masses.append(sum(weights[j] for j in chosen))
    return Captured(sum(masses) / len(masses), sum(shares) / len(shares))


def close(sample: LayerSample, guess: Guess, t: int, seen: list[int], g: int) -> dict[int, float]:
    q_TNH = sample.early_TNH if guess.lookahead else sample.q_TNH
    best = dict.fromkeys(seen, -math.inf)
    for n in (2 * g, 2 * g + 1):
        if guess.basis is None:
            scores = [float(sample.q_TNH[t, n] @ sample.k_TGH[j, g]) for j in seen]
        else:
            q_R = q_TNH[t, n] @ guess.basis.q_LGHR[sample.layer, g]
            scores = [float(q_R @ (sample.k_TGH[j, g] @ guess.basis.k_LGHR[sample.layer, g])) for j in seen]
        for j, score in zip(seen, scores, strict=True):
            best[j] = max(best[j], (score - max(scores)) / math.sqrt(HEAD_DIM))
    return best


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize(
    "selection",
    [
        Selection(alpha=2.0, most_share=1.0, num_first=0, num_last=1),
        Selection(alpha=math.inf, most_share=0.3, num_first=0, num_last=1),
        Selection(alpha=1.0, most_share=0.2, num_first=2, num_last=5),
        Selection(alpha=2.0, most_share=0.2, num_first=0, num_last=1, free_keys=7),
    ],
)
def test_mass_and_share(samples: list[LayerSample], basis: Basis, selection: Selection, window: int | None) -> None:
    guesses = [Guess(None, 0, selection), Guess(basis, 0, selection), Guess(basis, 1, selection)]
    found = captured(samples, guesses, POSITIONS, (window,) * 4)
    assert len({each.mass for each in found}) == 3
    for guess, got in zip(guesses, found, strict=True):
        expected = naive(samples, guess, window)
        assert got.mass == pytest.approx(expected.mass, abs=1e-5)
        assert got.share == pytest.approx(expected.share, abs=1e-6)


def test_all_keys_capture_all(samples: list[LayerSample], basis: Basis) -> None:
    everything = Selection(alpha=math.inf, most_share=1.0, num_first=0, num_last=1)
    [found] = captured(samples, [Guess(basis, 1, everything)], POSITIONS, WHOLE)
    assert found.mass == pytest.approx(1.0, abs=1e-6) and found.share == 1.0


def test_true_scores_capture_most_and_own_queries_more_than_predicted_ones(
    samples: list[LayerSample], basis: Basis
) -> None:
    some = Selection(alpha=math.inf, most_share=0.3, num_first=0, num_last=1)
    guesses = [Guess(None, 0, some), Guess(basis, 0, some), Guess(basis, 1, some)]
    best, own, early = captured(samples, guesses, POSITIONS, WHOLE)
    assert best.mass > own.mass > early.mass
