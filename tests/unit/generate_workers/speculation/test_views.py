"""What all views do whose drafts choose keys: attend to what they chose and nothing else, and change no text."""

import pytest

from generate_workers.config import SpeculationName
from generate_workers.speculation.making import CHOOSING
from generate_workers.speculation.port import DraftWish
from generate_workers.speculation.self_drafts import SelfDrafter
from tests.support.engines.draft_views import DECODER, VIEWS, Watching, decoding, lists_of, make_view, residency_of
from tests.support.engines.generation import prompt
from tests.unit.generate_workers.speculation.test_rounds import PARAMS, answers, prompts

views = pytest.mark.parametrize("name", VIEWS)
LENGTHS = (70, 9, 41)


def test_these_are_all_that_there_are() -> None:
    assert set(VIEWS) == set(CHOOSING)


def drafted(name: SpeculationName, num_keys: int, *, poison: bool = False) -> tuple[list[list[int]], Watching]:
    """Drafts of rows of uneven lengths and numbers of drafts, and what the draft steps attended to."""
    with decoding([prompt(length) for length in LENGTHS]) as (made, rows):
        watching = Watching(make_view(name, made, num_keys), residency_of(made), poison)
        wishes = [DraftWish(row, num) for row, num in zip(rows, (5, 2, 4), strict=True)]
        return [draft.token_ids for draft in SelfDrafter(made.decoder, watching).draft(wishes)], watching


@views
def test_nothing_but_the_chosen_keys_is_read(name: SpeculationName) -> None:
    as_they_are, watching = drafted(name, 24)
    assert drafted(name, 24, poison=True)[0] == as_they_are
    assert [len(ids) for ids in as_they_are] == [5, 2, 4]
    num_read = [len(keys) for step in watching.found for picks in step.values() if picks for keys in lists_of(picks)[0]]
    assert max(num_read) <= 24 + 12 + 5
    assert num_read


@views
def test_the_new_token_always_attends_to_itself_and_keys_ascend(name: SpeculationName) -> None:
    _, watching = drafted(name, 24)
    for index, step in enumerate(watching.found):
        assert set(step) == set(range(4))
        for picks in step.values():
            for keys in lists_of(picks)[0] if picks is not None else []:
                assert keys == sorted(set(keys))
                assert keys[-1] == LENGTHS[0] + index


@views
def test_texts_of_a_ragged_batch_are_those_of_plain_steps(name: SpeculationName) -> None:
    params = list(PARAMS.values())
    asked = [(ids, params[index % len(params)]) for index, ids in enumerate(prompts(5))]
    (said, logprobs), (plain, plain_logprobs) = (answers(asked, each, decoder=DECODER) for each in (name, "off"))
    assert said == plain
    assert logprobs == pytest.approx(plain_logprobs, abs=1e-4)
