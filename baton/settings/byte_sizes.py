"""Parses sizes and rates in the units that users write, like "1.5GiB" and "25GBps"."""

import re
from fractions import Fraction

_DECIMAL = {"": 1, "B": 1, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS = {**_DECIMAL, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_AMOUNT = re.compile(r"([0-9]{1,20}(?:\.[0-9]{1,20})?)\s*([A-Za-z]*)")


def parse_bytes(value: object) -> object:
    """Convert text like "512MiB" or "1.5 GiB" to a number of bytes. A value that is not text is returned unchanged.
    Raises ValueError for invalid text."""
    if not isinstance(value, str):
        return value
    match = _AMOUNT.fullmatch(value.strip())
    if match is None or match[2] not in _UNITS:
        units = ", ".join(unit for unit in _UNITS if unit)
        raise ValueError(f"{value!r} is not an amount of memory: use a number, alone (bytes) or with one of {units}")
    return int(Fraction(match[1]) * _UNITS[match[2]])


def parse_rate(value: object) -> object:
    """Convert text like "25GBps" or "4 GB/s" to a number of bytes per second. A value that is not text is returned
    unchanged. Raises ValueError for invalid text."""
    if not isinstance(value, str):
        return value
    amount = value.strip().removesuffix("ps").removesuffix("/s")
    if amount == value.strip():
        raise ValueError(f"{value!r} is not a rate: use a number of bytes a second, or one like 25GBps")
    return parse_bytes(amount)
