"""baton.text.stream: detokenizer and stop strings together, and the stream's rebuild from history."""

from hypothesis import given
from hypothesis import strategies as st

from baton.text.stop_strings import StopStrings
from baton.text.stream import TextStream
from baton.text.tokenizer import Tokenizer

TEXT = "One \U0001f308 two\n\nthree \u65e5\u672c four"


def run(stream: TextStream, ids: list[int]) -> tuple[str, int]:
    """The text of a stream, and how many tokens it took."""
    text = ""
    for count, token_id in enumerate(ids, start=1):
        result = stream.push(token_id)
        text += result.text
        if result.stopped:
            return text + stream.flush(), count
    return text + stream.flush(), len(ids)


def test_text_without_stop_is_whole(smollm: Tokenizer) -> None:
    ids = smollm.encode(TEXT)
    assert run(TextStream(smollm, StopStrings([]), ()), ids) == (TEXT, len(ids))


def test_text_ends_before_a_stop_string(smollm: Tokenizer) -> None:
    text, _ = run(TextStream(smollm, StopStrings(["\n\nthree"]), ()), smollm.encode(TEXT))
    assert text == "One \U0001f308 two"


def test_generation_stops_with_the_token_that_completes_the_stop_string(smollm: Tokenizer) -> None:
    ids = smollm.encode(TEXT)
    _, count = run(TextStream(smollm, StopStrings(["two"]), ()), ids)
    assert "two" in smollm.decode(ids[:count])
    assert "two" not in smollm.decode(ids[: count - 1])


def test_a_stop_string_may_begin_inside_a_split_character_token(smollm: Tokenizer) -> None:
    text, _ = run(TextStream(smollm, StopStrings(["\U0001f308"]), ()), smollm.encode(TEXT))
    assert text == "One "


def test_a_stop_string_may_be_completed_by_the_flush(smollm: Tokenizer) -> None:
    first, *_ = smollm.encode("\U0001f308")
    stream = TextStream(smollm, StopStrings(["\ufffd"]), ())
    stream.push(first)
    assert stream.flush() == ""


def test_flush_gives_back_half_a_stop_string(smollm: Tokenizer) -> None:
    assert run(TextStream(smollm, StopStrings(["four more"]), ()), smollm.encode(TEXT))[0] == TEXT


@given(text=st.text(), stop=st.lists(st.text("ab \n", min_size=1, max_size=3), max_size=3), at=st.integers(0, 30))
def test_a_rebuilt_stream_goes_on_exactly_where_the_first_one_was(
    smollm: Tokenizer, text: str, stop: list[str], at: int
) -> None:
    ids = smollm.encode(text + "ab a\nb \U0001f308 ab")
    first = TextStream(smollm, StopStrings(stop), ())
    for token_id in ids[:at]:
        first.push(token_id)
    second = TextStream.rebuild(smollm, StopStrings(stop), (), ids[:at])
    for token_id in ids[at:]:
        assert first.push(token_id) == second.push(token_id)
    assert first.flush() == second.flush()
