"""baton.text.stop_strings against a brute-force definition, for any text, any stop strings, cut anywhere."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from baton.text.stop_strings import StopChecker, StopStrings

letters = st.text("ab", max_size=12)
stops = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4)
pieces = st.lists(letters, max_size=8)


def cut(text: str, stop: list[str], start: int = 0, *, is_included: bool = False) -> tuple[str, bool]:
    """The definition: at the first end of any stop string behind `start`, before the longest one that ends there."""
    for end in range(start + 1, len(text) + 1):
        lengths = [len(pattern) for pattern in stop if text[:end].endswith(pattern)]
        if lengths:
            return text[: end if is_included else end - max(lengths)], True
    return text, False


def run(parts: list[str], stop: list[str], num_exempt: int = 0, *, is_included: bool = False) -> tuple[str, bool]:
    checker = StopChecker(StopStrings(stop, is_included=is_included))
    results = [checker.push(part, may_stop=place >= num_exempt) for place, part in enumerate(parts)]
    text = "".join(result.text for result in results) + checker.flush()
    return text, any(result.stopped for result in results)


@given(parts=pieces, stop=stops)
def test_text_is_cut_where_the_definition_says(parts: list[str], stop: list[str]) -> None:
    assert run(parts, stop) == cut("".join(parts), stop)


@given(parts=pieces, stop=stops, num_exempt=st.integers(0, 8), is_included=st.booleans())
@example(parts=["aa", "b"], stop=["aab"], num_exempt=1, is_included=False)
def test_text_that_may_not_stop_begins_a_stop_at_most(
    parts: list[str], stop: list[str], num_exempt: int, is_included: bool
) -> None:
    start = len("".join(parts[:num_exempt]))
    assert run(parts, stop, num_exempt, is_included=is_included) == cut(
        "".join(parts), stop, start, is_included=is_included
    )


@given(parts=st.lists(st.text()), stop=st.lists(st.text(min_size=1)))
def test_any_unicode_is_cut_where_the_definition_says(parts: list[str], stop: list[str]) -> None:
    assert run(parts, stop) == cut("".join(parts), stop)


@given(parts=pieces, stop=stops, ending=letters)
def test_what_was_emitted_is_never_part_of_a_later_stop(parts: list[str], stop: list[str], ending: str) -> None:
    checker = StopChecker(StopStrings(stop))
    emitted = "".join(checker.push(part).text for part in parts)
    assert cut("".join(parts) + ending, stop)[0].startswith(emitted)


@given(parts=pieces, stop=stops)
def test_nothing_is_held_that_could_be_emitted(parts: list[str], stop: list[str]) -> None:
    checker = StopChecker(StopStrings(stop))
    emitted = "".join(checker.push(part).text for part in parts)
    text, stopped = cut("".join(parts), stop)
    held = "" if stopped else text[len(emitted) :]
    assert held == "" or any(pattern.startswith(held) for pattern in stop)


@given(parts=pieces, stop=stops)
def test_the_stop_is_reported_with_the_piece_that_completes_it(parts: list[str], stop: list[str]) -> None:
    checker, text = StopChecker(StopStrings(stop)), ""
    for part in parts:
        text += part
        assert checker.push(part).stopped == cut(text, stop)[1]


def test_of_stops_that_end_together_the_earliest_start_wins() -> None:
    assert run(["xabc"], ["c", "abc", "bc"]) == ("x", True)


def test_the_stop_that_completes_first_wins_over_one_that_starts_first() -> None:
    assert run(["xabcd"], ["abcd", "bc"]) == ("xa", True)


def test_after_the_stop_everything_is_swallowed() -> None:
    checker = StopChecker(StopStrings(["b"]))
    checker.push("ab")
    assert checker.push("more").text == ""
    assert checker.push("more").stopped
    assert checker.flush() == ""


@pytest.mark.parametrize("stop", [StopStrings([]), StopStrings(["abcd"], is_included=True)])
def test_without_stop_strings_to_leave_out_nothing_is_held(stop: StopStrings) -> None:
    checker = StopChecker(stop)
    assert checker.push("abc").text == "abc"
    assert checker.flush() == ""


def test_an_empty_stop_string_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="empty stop string"):
        StopChecker(StopStrings(["a", ""]))
