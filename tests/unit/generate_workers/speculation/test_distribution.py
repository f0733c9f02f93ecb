"""Tokens that the engine verifies are distributed as the model's own, by both rules: chi-square against the exact joint
distribution of a few tokens, of all streams and of those whose first draft was rejected.

Streams differ in their seed only. Their first token comes from the prefill, the next ones from a round of drafts.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from baton.modeling.forward.sampling import probabilities
from baton.sampling_params import SamplingParams
from generate_workers.config import AcceptanceName, SpeculationName
from generate_workers.engine.scheduling_policy import StepPlan
from generate_workers.engine.speculation import Speculation
from generate_workers.engine.verified import Draft, Drafts, Verified
from generate_workers.slots.table import SlotTable
from tests.support.engines.drafting import Curbed
from tests.support.engines.generation import harness, prefilled
from tests.support.models.sampling import p_value
from tests.support.models.tiny_models import random_decoder

NUM_STREAMS, NUM_SLOTS = 1600, 32
NUM_TOKENS = 4
"""One from the prefill, and a round of three: of two drafts, and one token more."""
VOCAB_SIZE = 4
IDS = (0, 0, 1, 0, 2, 0, 3, 1, 1, 2, 1, 3, 2, 2, 3, 3, 0)
"""Holds every pair of tokens, so that something is known to have followed whichever comes."""
PARAMS = SamplingParams(max_tokens=NUM_TOKENS, temperature=1.6, ignore_eos=True)
DECODER = random_decoder(vocab_size=VOCAB_SIZE)
LEAST_P = 1e-4
Output = tuple[int, ...]


@cache
def target(output: Output) -> Tensor:
    """The distribution of the next token, after a whole forward."""
    _, logits_TV = prefilled(DECODER, [*IDS, *output])
    return probabilities(logits_TV[-1].clone(), PARAMS)


def joint(num_tokens: int) -> dict[Output, float]:
    """The probability of each output of so many tokens."""
    found: dict[Output, float] = {(): 1.0}
    for _ in range(num_tokens):
        found = {
            (*output, token_id): chance * float(target(output)[token_id])
            for output, chance in found.items()
            for token_id in target(output).nonzero().flatten().tolist()
        }
    return found


class Noted(Curbed):
    """Notes each row's first draft, and whether its first token was accepted."""

    def __init__(self, speculation: Speculation) -> None:
        super().__init__(speculation, lambda: 2)
        self.first: dict[int, tuple[Draft, bool]] = {}
        """Keyed by the row's seed, without rows that have no drafts."""

    def observe(self, plan: StepPlan, drafts: Drafts, verified: Verified) -> StepPlan:
        for slot, (row, num_accepted) in verified.num_accepted.items():
            self.first.setdefault(row.sampler.params.seed, (drafts[slot], num_accepted > 0))
        return super().observe(plan, drafts, verified)


def outputs(speculation: SpeculationName, acceptance: AcceptanceName) -> tuple[list[Output], Noted]:
    """The output of each stream, in the order of their seeds, and what was drafted."""
    noted: list[Noted] = []

    def make(slots: SlotTable, configured: Speculation | None) -> Noted:
        assert configured is not None
        noted.append(Noted(configured))
        return noted[0]

    with harness(
        decoder=DECODER,
        num_slots=NUM_SLOTS,
        max_slot_tokens=32,
        max_waiting=NUM_STREAMS,
        max_batched_tokens=NUM_SLOTS * len(IDS),
        speculation=speculation,
        acceptance=acceptance,
        draft_keys=6,
        speculator=make,
    ) as made:
        streams = [made.submit(IDS, replace(PARAMS, seed=seed))[1] for seed in range(NUM_STREAMS)]
        made.run()
    return [tuple(stream.token_ids) for stream in streams], noted[0]


def check(counts: Mapping[Output, int], expected: Mapping[Output, float]) -> None:
    """Raise AssertionError for counts that are unlikely, or of what cannot be."""
    cells = sorted(expected)
    assert set(counts) <= set(cells)
    found = torch.tensor([float(counts.get(cell, 0)) for cell in cells], dtype=torch.float64)
    assert p_value(found, torch.tensor([expected[cell] for cell in cells], dtype=torch.float64)) > LEAST_P


@pytest.mark.parametrize("acceptance", [pytest.param("coupled", marks=pytest.mark.ci), "maximal"])
@pytest.mark.parametrize("speculation", [pytest.param("streaming", marks=pytest.mark.ci), "ngram"])
def test_tokens_of_rounds_have_their_joint_distribution(
    speculation: SpeculationName, acceptance: AcceptanceName
) -> None:
    """A draft that is certain, or by the maximal rule, leaves max(p - q, 0) when it is rejected. A draft that is
    coupled to its token by their noise leaves that token no simple distribution, and the next one its own."""
    found, noted = outputs(speculation, acceptance)
    check(Counter(output[:3] for output in found), joint(3))
    last = defaultdict[Output, float](float)
    for output, chance in joint(NUM_TOKENS).items():
        last[output[1:]] += chance
    check(Counter(output[1:] for output in found), last)
    counts, expected, shares = Counter[Output](), defaultdict[Output, float](float), list[float]()
    for seed, (draft, is_accepted) in noted.first.items():
        first, second, third, *_ = found[seed]
        p_V, q_V = target((first,)), torch.zeros(VOCAB_SIZE, dtype=torch.float64)
        q_V[draft.token_ids[0]] = 1.0
        q_V = q_V if draft.drafted_V is None else draft.drafted_V[0]
        rest_V = (p_V - q_V).clamp(min=0)
        if speculation == "streaming" and acceptance == "coupled":
            rest_V = torch.eye(len(p_V), dtype=torch.float64)[second]
        else:
            shares.append(float(torch.minimum(p_V, q_V).sum()))
        if not is_accepted:
            counts[first, second, third] += 1
            for token_id in rest_V.nonzero().flatten().tolist():
                for last_id, chance in enumerate(target((first, token_id)).tolist()):
                    if chance:
                        expected[first, token_id, last_id] += chance * float(rest_V[token_id] / rest_V.sum())
    assert counts.total() > 200
    check(counts, expected)
    num_accepted = sum(is_accepted for _, is_accepted in noted.first.values())
    deviation = sum(share * (1 - share) for share in shares) ** 0.5
    assert not shares or num_accepted == pytest.approx(sum(shares), abs=4 * deviation + 1)
