"""Sampling under the masks of a real form: nothing else is chosen, reported, or proposed as a draft's distribution."""

from collections.abc import Iterator

import pytest
import torch

from baton.modeling.forward.sampling import SamplerState, probabilities, sample
from baton.sampling_params import SamplingParams, StructuredOutput
from baton.text.grammars import Grammars
from tests.support.models.tiny_tokenizer import EOS_ID, VOCAB_SIZE, ids_of, letter_grammars

FORM = StructuredOutput(regex="[abc]d+")


@pytest.fixture
def grammars() -> Iterator[Grammars]:
    made = letter_grammars()
    yield made
    made.close()


def state_of(grammars: Grammars, output: str = "", **fields: float) -> SamplerState:
    params = SamplingParams(structured_output=FORM, logprobs=20, **fields)  # type: ignore[arg-type]
    (masks,) = grammars.prepare(FORM, ids_of(output)).result(60)
    return SamplerState(params, (1,), ids_of(output), (EOS_ID,), masks=masks)


@pytest.mark.parametrize("vocab_size", [VOCAB_SIZE, VOCAB_SIZE + 31])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_only_allowed_tokens_are_chosen_and_reported(grammars: Grammars, vocab_size: int, temperature: float) -> None:
    for seed in range(20):
        logits = torch.randn(1, vocab_size, generator=torch.Generator().manual_seed(seed)) * 5
        (token,) = sample(logits, [state_of(grammars, temperature=temperature, seed=seed)])
        assert token.token_id in ids_of("abc")
        assert sorted(each.token_id for each in token.top) == sorted(ids_of("abc"))


def test_a_constrained_row_is_not_drawn_by_the_step_itself(grammars: Grammars) -> None:
    assert state_of(grammars).row_draw() is None


def test_appended_and_dropped_tokens_move_the_mask(grammars: Grammars) -> None:
    state = state_of(grammars, "a", temperature=1.0)
    logits = torch.zeros(VOCAB_SIZE)
    state.adjust(logits)
    assert probabilities(logits, state.params).nonzero().flatten().tolist() == [*ids_of("d")]
    state.append(ids_of("d")[0])
    state.adjust(logits := torch.zeros(VOCAB_SIZE))
    assert probabilities(logits, state.params).nonzero().flatten().tolist() == [*ids_of("d"), EOS_ID]
    state.drop(1)
    assert state.foresee([*ids_of("dd"), EOS_ID]) == 3
    assert state.foresee(ids_of("da")) == 1


def test_a_state_without_masks_foresees_all_drafts_and_settles_at_once() -> None:
    state = SamplerState(SamplingParams(), (1,))
    assert state.foresee([1, 2, 3]) == 3 and state.follow()
    state.settle(3)


def test_an_output_that_left_its_form_cannot_be_followed(grammars: Grammars) -> None:
    state = state_of(grammars)
    state.append(ids_of("x")[0])
    assert not state.follow()
