"""JSON of clients is bounded before anything is made of it, and holds nothing that could not be sent on."""

import json

import pytest

from baton.errors import InvalidArgumentError
from baton.limits import MAX_NESTING, MAX_OBJECTS, MAX_TEXTS, MAX_VALUES
from gateway.errors import BodyTooLargeError
from gateway.parsing.strict_json import read_json


@pytest.mark.parametrize(
    ("element", "most"),
    [(b"0", MAX_VALUES + 1), (b'""', MAX_TEXTS), (b'","', MAX_TEXTS), (b'"\\""', MAX_TEXTS)],
    ids=["numbers", "texts", "texts of commas", "texts of quotes"],
)
def test_as_many_values_as_the_limit_are_read_and_one_more_is_refused(element: bytes, most: int) -> None:
    elements = [element] * most
    value = read_json(b"[" + b",".join(elements) + b"]")
    assert isinstance(value, list) and len(value) == most
    with pytest.raises(BodyTooLargeError, match="the limit is"):
        read_json(b"[" + b",".join([*elements, element]) + b"]")


@pytest.mark.parametrize("element", [b"[]", b"{}"])
def test_as_many_objects_as_the_limit_are_read_and_one_more_is_refused(element: bytes) -> None:
    elements = [element] * (MAX_OBJECTS - 1)
    assert isinstance(read_json(b"[" + b",".join(elements) + b"]"), list)
    with pytest.raises(BodyTooLargeError, match=f"has {MAX_OBJECTS + 1} lists and objects"):
        read_json(b"[" + b",".join([*elements, element]) + b"]")


@pytest.mark.parametrize("text", [",[{" * 10**6, '\\",\\\\' * 10**6, '\\"[' * 10**6, "\\n,[" * 10**6])
def test_marks_in_a_text_do_not_count(text: str) -> None:
    assert read_json(json.dumps({"prompt": text}).encode()) == {"prompt": text}


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b'{"a": "\\ud83d"}', "half of a surrogate pair"),
        (b'{"\\uDE00": 1}', "half of a surrogate pair"),
        (b'{"a": [NaN]}', r"a\[0\] holds NaN"),
        (b'{"a": -Infinity}', "a holds -Infinity"),
        (b'{"a": 1e999}', "a holds 1e999, which is too large"),
        (b'{"a": "\xff"}', "not UTF-8 at byte 7"),
        (b'{"a": "\xed\xa0\xbd"}', "not UTF-8 at byte 7"),
        (b'{"a": }', "not valid JSON: Expecting value at character 6"),
        (b"[" * 15_000, "nested too deeply"),
        (b"1" * 5000, "not valid JSON: Exceeds the limit"),
    ],
)
def test_what_could_not_be_sent_on_is_refused_as_it_is_read(body: bytes, reason: str) -> None:
    with pytest.raises(InvalidArgumentError, match=reason):
        read_json(body)


@pytest.mark.parametrize("body", [b'{"a": "\\ud83d\\ude00"}', b'\xef\xbb\xbf{"a": "\xf0\x9f\x98\x80"}'])
def test_whole_characters_are_read(body: bytes) -> None:
    assert read_json(body) == {"a": "\U0001f600"}


@pytest.mark.parametrize("opening", [b"[", b'{"a":'])
def test_as_many_levels_as_the_limit_are_read_and_one_more_is_refused(opening: bytes) -> None:
    closing = b"]" if opening == b"[" else b"}"
    assert read_json(opening * MAX_NESTING + b"1" + closing * MAX_NESTING)
    with pytest.raises(InvalidArgumentError, match=f"nested too deeply: the limit is {MAX_NESTING} "):
        read_json(opening * (MAX_NESTING + 1) + b"1" + closing * (MAX_NESTING + 1))


@pytest.mark.parametrize(
    ("text", "path"),
    [
        (rb'{"a": "", "b": [{"": "x", "c": "\ud83d"}]}', "b[0].c"),
        (rb'{"a": {"b": {"\ud83d": 1}}}', "a.b"),
        (rb'{"\ud83d": 1}', "body"),
        (rb'"\ud83d"', "body"),
        (rb"[1, [2, NaN]]", "[1][1]"),
        (rb'{"a": NaN, "b": NaN}', "a"),
        (rb'{"a": NaN, "a": 1}', "body"),
        (rb'{"x y": 1e999}', "'x y'"),
    ],
)
def test_an_error_begins_with_the_path_of_the_value(text: bytes, path: str) -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        read_json(text)
    assert str(refused.value).startswith(f"{path} holds ")


def test_a_path_within_a_text_begins_with_the_name_of_the_text() -> None:
    for text, path in ((b'{"a": NaN}', "calls[0].arguments.a"), (b"NaN", "calls[0].arguments")):
        with pytest.raises(InvalidArgumentError) as refused:
            read_json(text, "calls[0].arguments")
        assert str(refused.value).startswith(f"{path} holds NaN")
