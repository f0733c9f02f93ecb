"""Reads JSON that clients send: bodies, and JSON text inside of bodies. The number of values is limited before the text
is parsed, so that the parsed value is small. The functions have no side effects."""

import json
import math
import re
from collections.abc import Callable, Iterable
from typing import Self

from baton.errors import InvalidArgumentError
from baton.limits import MAX_NESTING, MAX_OBJECTS, MAX_TEXTS, MAX_VALUES
from gateway.errors import BodyTooLargeError

_OTHERS = bytes(byte for byte in range(256) if byte not in b'",:[{')
"""Bytes that are ignored when the values of a JSON text are counted, because they neither begin nor separate values."""
_TEXT = re.compile(rb'"[^"]*"')
_HALF = re.compile(r"\\u[dD][89a-fA-F]")
"""JSON escape of a UTF-16 surrogate. Surrogates are valid only in pairs."""
_CONTAINERS = (dict, list)
_BODY = "body"
_PLAIN_KEY = re.compile(r"\w{1,64}", re.ASCII)


def read_json(data: bytes, where: str = _BODY) -> object:
    """Parse JSON text in UTF-8, and return its value. `where` is the name of the text in errors. Blocks while a long
    text is parsed.

    Raises BodyTooLargeError if a body has too many values. Raises InvalidArgumentError if another text has too many
    values, and for invalid JSON. For an unpaired UTF-16 surrogate, a number that is not finite, and a value that is
    nested too deeply, the error's text begins with the path of the value.
    """
    _check_size(data, where)
    numbers = _Numbers()
    try:
        text = data.decode("utf-8-sig")
        value: object = json.loads(text, parse_constant=numbers.refuse_constant, parse_float=numbers.finite)
    except UnicodeDecodeError as error:
        raise InvalidArgumentError(f"{where} is not UTF-8 at byte {error.start}: {error.reason}") from error
    except RecursionError as error:
        raise InvalidArgumentError(_too_deep(where)) from error
    except json.JSONDecodeError as error:
        raise InvalidArgumentError(f"{where} is not valid JSON: {error.msg} at character {error.pos}") from error
    except ValueError as error:  # a whole number of thousands of digits
        raise InvalidArgumentError(f"{where} is not valid JSON: {error}") from error
    if _num_objects(data) > MAX_NESTING:  # else they cannot be nested too deeply
        _check_nesting(value, where)
    if numbers.reason:
        raise InvalidArgumentError(f"{_path(value, lambda each: each is numbers, where)} holds {numbers.reason}")
    if "\\u" in text and _HALF.search(text):
        _check_characters(value, where)
    return value


class _Numbers:
    """Reads the numbers of a text. In the text's value, this object replaces the numbers that are refused."""

    def __init__(self) -> None:
        self.reason = ""
        """Reason for refusing the first of these numbers. Empty: all numbers are accepted."""

    def refuse_constant(self, name: str) -> Self:
        """Refuse NaN or an infinity."""
        self.reason = self.reason or f"{name}, which is not valid JSON: send a number, or null"
        return self

    def finite(self, number: str) -> float | Self:
        """Return the value of a number, or refuse it if it is too large."""
        if math.isfinite(found := float(number)):
            return found
        self.reason = self.reason or f"{number:.40}, which is too large: use at most 1e308"
        return self


def _check_size(data: bytes, where: str) -> None:
    """Refuse a text with too many values before it is parsed. Takes 0.2 s of a Zen 3 core for the slowest text of 16
    MiB."""
    if _num_values(data) <= MAX_VALUES and _num_texts(data) <= MAX_TEXTS and _num_objects(data) <= MAX_OBJECTS:
        return  # even if all marks, including those within texts, count
    marks = data.replace(rb"\\", b"").replace(rb"\"", b"").translate(None, _OTHERS)
    if (number := _num_texts(marks)) > MAX_TEXTS:
        raise _too_many(where, f"{number} texts and keys", MAX_TEXTS)
    # only marks are left: two quotes in a row are a text without marks, because a mark separates any two texts
    marks = _TEXT.sub(b"", marks.replace(b'""', b""))
    if (number := _num_values(marks)) > MAX_VALUES:
        raise _too_many(where, f"{number} values", MAX_VALUES)
    if (number := _num_objects(marks)) > MAX_OBJECTS:
        raise _too_many(where, f"{number} lists and objects", MAX_OBJECTS)


def _too_many(where: str, found: str, limit: int) -> InvalidArgumentError:
    kind = BodyTooLargeError if where == _BODY else InvalidArgumentError
    return kind(f"{where} has {found}: the limit is {limit}; send fewer")


def _num_values(data: bytes) -> int:
    return data.count(b",")


def _num_texts(data: bytes) -> int:
    return data.count(b'"') // 2


def _num_objects(data: bytes) -> int:
    return data.count(b"[") + data.count(b"{")


def _check_nesting(value: object, where: str) -> None:
    if _depth(value) > MAX_NESTING:
        deep = next(each for each in _inside(value) if _depth(each) >= MAX_NESTING)
        raise InvalidArgumentError(_too_deep(_path(value, lambda each: each is deep, where)))


def _depth(value: object) -> int:
    """Return the number of lists and objects within each other."""
    depth, level = 0, [value]
    while level := [each for each in level if isinstance(each, _CONTAINERS)]:
        depth += 1
        level = [inner for each in level for inner in _inside(each)]
    return depth


def _inside(value: object) -> Iterable[object]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _too_deep(path: str) -> str:
    return f"{path} is nested too deeply: the limit is {MAX_NESTING} lists and objects within each other; use fewer"


def _check_characters(value: object, where: str) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        path = _path(value, _is_broken, where)
        raise InvalidArgumentError(f"{path} holds half of a surrogate pair: send whole characters") from error


def _is_broken(value: object) -> bool:
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return True
    return False


def _path(value: object, is_wrong: Callable[[object], bool], where: str) -> str:
    """Return the path of the first wrong value, such as `tools[0].name`. The path of a wrong key is that of its object.
    `where` is returned for the whole value, and precedes the paths in JSON text inside of a body."""
    steps = "".join(_steps(value, is_wrong) or ())
    return steps.lstrip(".") or where if where == _BODY else where + steps


def _steps(value: object, is_wrong: Callable[[object], bool]) -> list[str] | None:
    """Return the steps from a value to the first wrong value in it; None if it has none."""
    if is_wrong(value) or (isinstance(value, dict) and any(map(is_wrong, value))):
        return []
    entries: Iterable[tuple[str | int, object]] = ()
    if isinstance(value, dict):
        entries = value.items()
    elif isinstance(value, list):
        entries = enumerate(value)
    for key, each in entries:
        if (found := _steps(each, is_wrong)) is not None:
            return [f"[{key}]" if isinstance(key, int) else f".{_shown(key)}", *found]
    return None


def _shown(key: str) -> str:
    return key if _PLAIN_KEY.fullmatch(key) else f"{key!a:.40}"
