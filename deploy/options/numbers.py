"""Numbers as options of the command line spell them; InvalidArgumentError names option, value and range."""

from baton.errors import InvalidArgumentError


def counts(option: str, text: str, most: int) -> list[int]:
    """Whole numbers joined by commas, ascending, each once."""
    return sorted({count(option, part, most) for part in text.split(",")})


def count(option: str, text: str, most: int) -> int:
    """A whole number, `k` for 1024 times it."""
    digits, factor = (text.strip()[:-1], 1024) if text.strip().endswith("k") else (text.strip(), 1)
    if not digits.isascii() or not digits.isdigit() or not 1 <= int(digits) * factor <= most:
        raise InvalidArgumentError(f"{option}: {text.strip()!r} is out of range: use whole numbers from 1 to {most}")
    return int(digits) * factor


def positive(option: str, text: str) -> float:
    """A finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise InvalidArgumentError(f"{option} = {text!r} is out of range: use a number above 0")
    return value


def assignments(option: str, text: str) -> dict[str, int]:
    """FIELD=N,... as a table."""
    fields = {}
    for assignment in text.split(","):
        field, equals, value = (part.strip() for part in assignment.partition("="))
        if not equals or not (value.isascii() and value.isdigit()):
            raise InvalidArgumentError(f"{option}: {assignment!r} is no FIELD=NUMBER: write for example num_layers=32")
        fields[field] = int(value)
    return fields


def check_threads(num_threads: int) -> None:
    """Raises InvalidArgumentError for a number of threads that nobody has."""
    if num_threads < 0:
        raise InvalidArgumentError(f"--threads {num_threads} is out of range: use 0 (all cores) or more")
