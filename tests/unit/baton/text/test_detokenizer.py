"""baton.text.detokenizer: the texts of all pushes make what decoding everything at once makes."""

import random
from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from baton.text.detokenizer import Detokenizer
from baton.text.tokenizer import Tokenizer
from tests.support.models.tokenizers import sentencepiece_tokens

BYTE_0 = 3
"""The sample sentencepiece vocabulary's token for byte 0."""


def stream(tokenizer: Tokenizer, ids: list[int], prompt_ids: Sequence[int] = ()) -> list[str]:
    detokenizer = tokenizer.detokenizer(prompt_ids)
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()]


def bytes_of(text: bytes) -> list[int]:
    return [BYTE_0 + byte for byte in text]


@given(text=st.text())
@example(text="\ufffd\ufffd\ufffd\ufffd\ufffd x")
@example(text=" leading, \u65e5\u672c \U0001f3f3\ufe0f\u200d\U0001f308 e\u0301")
def test_byte_level_text_is_equal(smollm: Tokenizer, text: str) -> None:
    ids = smollm.encode(text)
    assert "".join(stream(smollm, ids)) == smollm.decode(ids)


@given(ids=st.lists(st.integers(0, 49151 + 10)))
def test_byte_level_random_ids_are_equal(smollm: Tokenizer, ids: list[int]) -> None:
    assert "".join(stream(smollm, ids)) == smollm.decode(ids)


@settings(max_examples=50)
@given(seed=st.integers(0, 2**32))
def test_byte_level_broken_utf8_is_equal(smollm: Tokenizer, seed: int) -> None:
    """Long runs of tokens that start or continue a character, so that cuts are made inside them."""
    rng = random.Random(seed)
    broken = [token_id for char in "\u65e5\U0001f308\u00e9\U0001d54f" for token_id in smollm.encode(char)]
    pool = [*broken, *rng.sample(range(49152), 3)] if rng.random() < 0.5 else broken
    ids = rng.choices(pool, k=rng.randrange(200))
    assert "".join(stream(smollm, ids)) == smollm.decode(ids)


@given(num_before=st.integers(0, 40), num_units=st.integers(10, 60))
def test_a_long_run_of_broken_characters_is_equal(smollm: Tokenizer, num_before: int, num_units: int) -> None:
    """A broken character of several tokens is one U+FFFD; cut in two it would be two."""
    *unfinished, _ = smollm.encode("\U0001f308")
    assert len(unfinished) > 1
    assert smollm.decode(unfinished) == "\ufffd"
    ids = unfinished[:1] * num_before + unfinished * num_units + smollm.encode("\U0001f308 end")
    assert "".join(stream(smollm, ids)) == smollm.decode(ids)


@given(text=st.text())
@example(text="  hello  a hello")
@example(text="\U0001f308\U0001f308\u65e5")
@example(text="\ufffd\ufffd\ufffd\ufffda")
def test_sentencepiece_text_is_equal(sentencepiece: Tokenizer, text: str) -> None:
    ids = sentencepiece.encode(text)
    assert "".join(stream(sentencepiece, ids)) == sentencepiece.decode(ids)


@given(ids=st.lists(st.integers(0, len(sentencepiece_tokens()) + 5)))
def test_sentencepiece_random_ids_are_equal_but_for_valid_parts_of_broken_runs(
    sentencepiece: Tokenizer, ids: list[int]
) -> None:
    """ASCII bytes are valid on their own; without them a random run of bytes hardly holds a valid part."""
    ids = [token_id for token_id in ids if not BYTE_0 <= token_id < BYTE_0 + 0x80]
    streamed, whole = "".join(stream(sentencepiece, ids)), sentencepiece.decode(ids)
    assert len(streamed) <= len(whole)
    assert streamed.replace("\ufffd", "") == whole.replace("\ufffd", "") or "\ufffd" in whole


@given(runs=st.lists(st.tuples(st.binary(max_size=60), st.sampled_from(["a", "hello", "\u2581a"]))))
def test_sentencepiece_broken_runs_leave_the_words_between_alone(
    sentencepiece: Tokenizer, runs: list[tuple[bytes, str]]
) -> None:
    tokens = sentencepiece_tokens()
    ids = [token_id for run, word in runs for token_id in (*bytes_of(run), tokens.index(word))]
    text = "".join(stream(sentencepiece, ids))
    for _, word in runs:
        start = text.find(word.replace("\u2581", "").strip())
        assert start >= 0
        text = text[start + 1 :]


@pytest.mark.parametrize("name", ["smollm", "sentencepiece"])
@given(text=st.text(st.characters(codec="utf-8", exclude_characters="\ufffd")), place=st.integers(0, 300))
@example(text="hello hello", place=2)
@example(text="hello  a", place=3)
@example(text="\U0001f308\u65e5\U0001f308 hello", place=8)
def test_after_a_prompt_text_goes_on_as_the_whole_text_does(
    request: pytest.FixtureRequest, name: str, text: str, place: int
) -> None:
    """The sentencepiece tokenizer drops a space at the start of a text, and spells characters by runs of bytes."""
    tokenizer: Tokenizer = request.getfixturevalue(name)
    ids = tokenizer.encode(text)
    prompt_ids, output_ids = ids[:place], ids[place:]
    prompt = tokenizer.decode(prompt_ids)
    if not prompt.endswith("\ufffd"):
        assert prompt + "".join(stream(tokenizer, output_ids, [*prompt_ids, 2])) == tokenizer.decode(ids)


@pytest.mark.parametrize(
    ("token", "text"), [("\u2581hello", " hello"), ("hello", "hello"), ("</s>", ""), ("<0xE6>", "\ufffd")]
)
def test_a_token_s_text_is_that_within_a_text(sentencepiece: Tokenizer, token: str, text: str) -> None:
    assert sentencepiece.token_text(sentencepiece_tokens().index(token)) == text


def test_valid_characters_that_were_returned_stand_when_their_run_breaks(sentencepiece: Tokenizer) -> None:
    ids = [*bytes_of("\u65e5".encode()), *bytes_of(b"\xe6"), sentencepiece_tokens().index("a")]
    assert "".join(stream(sentencepiece, ids)) == "\u65e5\ufffda"


def test_sentencepiece_spaces_between_words_are_kept(sentencepiece: Tokenizer) -> None:
    tokens = sentencepiece_tokens()
    ids = [tokens.index("\u2581hello"), tokens.index("\u2581"), tokens.index("\u2581a")]
    assert stream(sentencepiece, ids) == ["hello", " ", " a", ""]


def test_a_split_character_comes_with_its_last_token(smollm: Tokenizer) -> None:
    ids = smollm.encode("\U0001f308")
    assert len(ids) > 1
    assert stream(smollm, ids) == [*[""] * (len(ids) - 1), "\U0001f308", ""]


def test_text_before_a_split_character_is_not_held(smollm: Tokenizer) -> None:
    first, *_ = smollm.encode(" \U0001f308")
    assert smollm.decode([first]) == " \ufffd"
    assert smollm.detokenizer().push(first) == " "


def test_flush_returns_the_broken_end(smollm: Tokenizer) -> None:
    first, *_ = smollm.encode("\U0001f308")
    assert stream(smollm, [first]) == ["", "\ufffd"]


def test_flush_twice_returns_nothing_more(smollm: Tokenizer) -> None:
    detokenizer = smollm.detokenizer()
    detokenizer.push(smollm.encode("\U0001f308")[0])
    detokenizer.flush()
    assert detokenizer.flush() == ""


def test_special_tokens_do_not_come_between_a_word_and_its_space(sentencepiece: Tokenizer) -> None:
    tokens = sentencepiece_tokens()
    ids = [tokens.index("hello"), *[2] * 100, tokens.index("\u2581a")]
    assert "".join(stream(sentencepiece, ids)) == "hello a"


def test_work_a_token_is_bounded_however_long_the_text_is_broken(smollm: Tokenizer) -> None:
    longest = 0

    def decode(ids: object) -> str:
        nonlocal longest
        assert isinstance(ids, list)
        longest = max(longest, len(ids))
        return smollm.decode(ids)

    detokenizer = Detokenizer(decode, lambda token_id: False)
    first, *_ = smollm.encode("\U0001f308")
    for _ in range(500):
        detokenizer.push(first)
    assert longest <= 40
