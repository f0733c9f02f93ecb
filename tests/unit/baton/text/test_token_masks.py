"""Masks follow tokens that are appended, dropped and appended anew, however drafts go."""

import random
from collections.abc import Iterator

import pytest

from baton.errors import InvalidArgumentError
from baton.sampling_params import StructuredOutput
from baton.text.grammars import Grammars
from baton.text.token_masks import ChoiceMasks, Mask
from tests.support.models.tiny_tokenizer import EOS_ID, ids_of, letter_grammars, text_of

FORM = StructuredOutput(regex="([ab]c|dd*e)*")
FORMS = [FORM, StructuredOutput(regex="([ab]c|dd*e){0,4}x"), StructuredOutput(regex="[a-c]{20}[0-9]{20}")]
"""One that goes on for ever, and two that end; the library knows of the ends before they come."""


@pytest.fixture
def made() -> Iterator[Grammars]:
    found = letter_grammars()
    yield found
    found.close()


def begin(made: Grammars, text: str = "", form: StructuredOutput = FORM) -> ChoiceMasks:
    (masks,) = made.prepare(form, ids_of(text)).result(60)
    return masks


def allowed_ids(mask: Mask) -> list[int]:
    return [token_id for token_id, most in enumerate(mask) if most > 0]


def expected(made: Grammars, form: StructuredOutput, token_ids: list[int]) -> list[int]:
    """Ids that may follow these tokens, by a matcher that was given nothing else."""
    matcher = made.compile(form).matcher()
    matcher.consume(token_ids)
    return allowed_ids(matcher.mask())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("seed", range(5))
def test_any_order_of_appending_dropping_and_foreseeing_gives_the_masks_of_the_tokens(
    made: Grammars, form: StructuredOutput, seed: int
) -> None:
    rng, masks = random.Random(seed), begin(made, form=form)
    token_ids, num_drafts = list[int](), 0
    for _ in range(150):
        allowed = expected(made, form, token_ids)
        assert allowed_ids(masks.allowed()) == allowed
        choice = rng.random()
        if choice < 0.2 and num_drafts:
            num = rng.randrange(1, num_drafts + 1)
            masks.drop(num)
            del token_ids[-num:]
            num_drafts -= num
        elif choice < 0.35 and EOS_ID not in token_ids:
            drafts = [rng.choice(ids_of("abcdex01")) for _ in range(rng.randrange(1, 5))] + [EOS_ID]
            num_allowed = masks.foresee(drafts)
            masks.settle(num_allowed)
            num_drafts = 0
            assert num_allowed == num_followed(made, form, token_ids, drafts)
        else:
            token_ids.append(rng.choice(allowed))
            masks.append(token_ids[-1])
            num_drafts += 1


def num_followed(made: Grammars, form: StructuredOutput, token_ids: list[int], drafts: list[int]) -> int:
    for num, draft in enumerate(drafts):
        if draft not in expected(made, form, [*token_ids, *drafts[:num]]):
            return num
    return len(drafts)


def test_drafts_are_cut_where_they_leave_the_form(made: Grammars) -> None:
    masks = begin(made, "ac")
    assert masks.foresee(ids_of("ddeaca")) == 6
    assert masks.foresee(ids_of("ddex")) == 3
    assert masks.foresee(ids_of("x")) == 0
    assert masks.foresee([EOS_ID, EOS_ID]) == 1
    assert allowed_ids(masks.allowed()) == expected(made, FORM, list(ids_of("ac")))


def test_a_token_that_is_not_of_the_form_is_told_when_its_mask_is_asked_for(made: Grammars) -> None:
    masks = begin(made)
    masks.append(ids_of("x")[0])
    for ask in (masks.allowed, lambda: masks.settle(0)):
        with pytest.raises(InvalidArgumentError, match="output token 0 "):
            ask()


def test_the_end_may_be_drafted_and_dropped(made: Grammars) -> None:
    masks = begin(made, "ac")
    masks.append(EOS_ID)
    masks.append(EOS_ID)
    assert allowed_ids(masks.allowed()) == [EOS_ID]
    masks.drop(2)
    masks.append(ids_of("b")[0])
    assert text_of(allowed_ids(masks.allowed())) == "c"
