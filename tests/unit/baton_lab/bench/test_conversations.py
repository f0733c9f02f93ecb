"""Conversations: what they share, how long they are, and that none comes twice unless it is asked for."""

from itertools import islice

import numpy as np
import pytest

from baton_lab.bench.conversations import Shape, conversations, replayed
from baton_lab.bench.lengths import MIXES, Mix, Spread
from baton_lab.bench.passages import NOVEL, Passages, read_words
from baton_lab.traffic.traces.trace import Trace
from baton_lab.traffic.traces.trace_files import read_trace
from tests.support.folders import ROOT

WORDS = read_words(NOVEL)
SHORT = Mix(Spread(30), Spread(10))


def passages() -> Passages:
    made = Passages(WORDS, 1)
    made.tokens_per_word = 1.0
    return made


def test_turns_are_of_the_mix_and_their_texts_differ() -> None:
    made = list(islice(conversations(passages(), Shape(SHORT, num_turns=3), 1), 50))
    turns = [turn for each in made for turn in each.turns]
    assert [each.number for each in made] == list(range(50)) and len(turns) == 150
    assert {len(turn.text.split()) for turn in turns} == {30} and {turn.max_tokens for turn in turns} == {10}
    assert len({turn.text for turn in turns}) == 150
    assert {each.system for each in made} == {""}


def test_all_conversations_of_a_load_share_the_system_prompt() -> None:
    shape, text = Shape(SHORT, system_tokens=100), passages()
    first, second = (list(islice(conversations(text, shape, 1), 5)) for _ in range(2))
    assert len({each.system for each in first}) == 1 and len(first[0].system.split()) == 100
    assert first[0].system != second[0].system
    assert {turn.text for each in first for turn in each.turns}.isdisjoint(
        turn.text for each in second for turn in each.turns
    )


def test_lengths_are_the_same_for_the_same_seed() -> None:
    def lengths(seed: int) -> list[int]:
        made = islice(conversations(passages(), Shape(MIXES["sharegpt"]), seed), 20)
        return [turn.max_tokens for each in made for turn in each.turns]

    assert lengths(1) == lengths(1) != lengths(2)


def test_conversations_come_again_only_if_asked_to() -> None:
    made = list(islice(conversations(passages(), Shape(SHORT, num_prompts=2), 1), 5))
    assert [each.number for each in made] == [0, 1, 2, 3, 4]
    assert made[0].turns == made[2].turns == made[4].turns != made[1].turns == made[3].turns


def test_users_think_for_random_times_of_the_given_mean_but_not_before_the_first_turn() -> None:
    made = islice(conversations(passages(), Shape(Mix(Spread(2), Spread(1)), num_turns=9, think_s=2.0), 1), 500)
    thoughts = [[turn.think_s for turn in each.turns] for each in made]
    assert {each[0] for each in thoughts} == {0.0}
    later = np.array([each[1:] for each in thoughts])
    assert later.mean() == pytest.approx(2.0, rel=0.05) and later.std() == pytest.approx(2.0, rel=0.08)


def test_conversations_end_before_the_model_has_no_room() -> None:
    (made,) = islice(conversations(passages(), Shape(SHORT, num_turns=9, system_tokens=10, context_tokens=200), 1), 1)
    assert len(made.turns) == 4  # 10 of the system and 4 turns of 40 come to 170 of 180


def test_a_request_that_the_model_has_no_room_for_is_cut() -> None:
    (made,) = islice(conversations(passages(), Shape(Mix(Spread(900), Spread(20)), context_tokens=100), 1), 1)
    (turn,) = made.turns
    assert (len(turn.text.split()), turn.max_tokens) == (70, 20)
    (made,) = islice(conversations(passages(), Shape(Mix(Spread(900), Spread(900)), context_tokens=100), 1), 1)
    assert (len(made.turns[0].text.split()), made.turns[0].max_tokens) == (45, 45)


def test_a_trace_is_replayed_with_its_lengths_and_shared_beginnings() -> None:
    trace = read_trace(ROOT / "tests/data/trace_mooncake.jsonl")
    made = list(replayed(passages(), trace, Shape(SHORT), 0))
    assert [each.turns[0].max_tokens for each in made] == trace.output_tokens.tolist()
    for each, num_tokens, blocks in zip(made, trace.prompt_tokens, trace.blocks, strict=True):
        # A block's name stands before its text.
        assert len(each.turns[0].text.split()) == num_tokens + len(blocks)
    first, second = (each.turns[0].text.split() for each in made[:2])
    assert trace.blocks[0][:2] == trace.blocks[1][:2] and trace.blocks[0][2] != trace.blocks[1][2]
    assert first[: 2 * 513] == second[: 2 * 513] and first[2 * 513] != second[2 * 513]


def test_a_trace_without_blocks_shares_nothing() -> None:
    trace = Trace("t", np.array([0.0, 1.0]), np.array([20, 20]), np.array([3, 4]))
    first, second = replayed(passages(), trace, Shape(SHORT), 0)
    assert first.turns[0].text.split()[:8] != second.turns[0].text.split()[:8]
    assert [first.turns[0].max_tokens, second.turns[0].max_tokens] == [3, 4]
