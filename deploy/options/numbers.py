"""Parses numbers in command-line options. The text of an InvalidArgumentError names the option, the value and the
permitted range."""

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from baton.errors import InvalidArgumentError
from baton.settings.byte_sizes import parse_rate

Number = TypeVar("Number", int, float)


def ascending(option: str, text: str, parse: Callable[[str, str], Number]) -> tuple[Number, ...]:
    """Parse comma-separated numbers, each with `parse(option, text)`. Return them in ascending order without
    duplicates. Raises the errors of `parse`."""
    return tuple(sorted({parse(option, each.strip()) for each in text.split(",")}))


def counts(option: str, text: str, most: int, least: int = 1) -> tuple[int, ...]:
    """Parse comma-separated integers from `least` to `most`. Return them in ascending order without duplicates. Raises
    InvalidArgumentError."""
    return ascending(option, text, partial(count, most=most, least=least))


def count(option: str, text: str, most: int, least: int = 1) -> int:
    """Parse an integer, and return it. The suffix `k` multiplies the integer by 1024. Raises InvalidArgumentError if
    the text is not an integer, or if the result is not in the range `least` to `most`."""
    digits, factor = (text.strip()[:-1], 1024) if text.strip().endswith("k") else (text.strip(), 1)
    if not digits.isascii() or not digits.isdigit() or not least <= int(digits) * factor <= most:
        allowed = f"use whole numbers from {least} to {most}"
        raise InvalidArgumentError(f"{option}: {text.strip()!r} is out of range: {allowed}")
    return int(digits) * factor


def positive(option: str, text: str, *, or_zero: bool = False) -> float:
    """Parse a finite number greater than 0. If `or_zero` is true, 0 is also valid. Raises InvalidArgumentError."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf") or not (value or or_zero):
        least = "of at least 0" if or_zero else "above 0"
        raise InvalidArgumentError(f"{option} = {text!r} is out of range: use a number {least}")
    return value


def part(option: str, text: str) -> float:
    """Parse a fraction: a number greater than 0 and at most 1. Raises InvalidArgumentError."""
    value = positive(option, text)
    if value > 1:
        raise InvalidArgumentError(f"{option}: {value:g} is out of range: use a part of 1")
    return value


def rate(option: str, text: str) -> float:
    """Parse a rate above 0, for example 25GBps, and return it in bytes per second. Raises InvalidArgumentError."""
    try:
        found = parse_rate(text)
    except ValueError as error:
        raise InvalidArgumentError(f"{option}: {error}") from error
    assert isinstance(found, int)
    if not found:
        raise InvalidArgumentError(f"{option}: {text!r} brings nothing: use a rate above 0")
    return float(found)


def assignments(option: str, text: str) -> dict[str, int]:
    """Parse text of the form FIELD=N,FIELD=N,... and return the numbers by field name. Raises InvalidArgumentError."""
    fields = {}
    for assignment in text.split(","):
        field, equals, value = (part.strip() for part in assignment.partition("="))
        if not equals or not (value.isascii() and value.isdigit()):
            raise InvalidArgumentError(f"{option}: {assignment!r} is not FIELD=NUMBER: write for example num_layers=32")
        fields[field] = int(value)
    return fields


def check_threads(num_threads: int) -> None:
    """Raise InvalidArgumentError for a negative number of threads."""
    if num_threads < 0:
        raise InvalidArgumentError(f"--threads {num_threads} is out of range: use 0 (all cores) or more")


def check_timeout(seconds: float | None) -> None:
    """Raise InvalidArgumentError unless the timeout in seconds is above 0 and finite. None means no timeout, and is
    valid."""
    if seconds is not None and not 0 < seconds < float("inf"):
        raise InvalidArgumentError(f"--timeout {seconds:g} is out of range: use a time above 0 seconds")
