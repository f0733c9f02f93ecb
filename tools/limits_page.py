"""Generates the text of docs/reference/limits.md from `baton.limits`. `tools.pages` writes the file."""

from itertools import groupby
from typing import get_type_hints

from baton import limits
from baton.limits import Limit

_HEAD = """\
# Limits

Bounds on what one client can cost a server: constants of `baton/limits.py`, from which `python -m tools.pages`
writes this page. [security.md](../security.md) says what they protect. The error is gRPC's status and HTTP's, in this
order; a message names the field, the value and the limit. Limits that an operator sets are settings: the queue and
the shares of tenants ([tenants.md](../tenants.md)), kept responses, deadlines and idle connections
([http.md](../http.md)).
"""


def page() -> str:
    """Return the text of the page docs/reference/limits.md."""
    hints = get_type_hints(limits, include_extras=True)
    found = [(name, hint.__metadata__[0]) for name, hint in hints.items() if hasattr(hint, "__metadata__")]
    parts = [_HEAD]
    for door, of_door in groupby(found, lambda each: each[1].door):
        rows = "\n".join(_row(name, limit) for name, limit in of_door)
        parts.append(f"## {door}\n\n| limit | value | error | name |\n|---|---|---|---|\n{rows}\n")
    return "\n".join(parts)


def _row(name: str, limit: Limit) -> str:
    return f"| {limit.meaning} | {_value(getattr(limits, name), limit.unit)} | {limit.error} | `{name}` |"


def _value(value: float, unit: str) -> str:
    if unit == "bytes":
        return f"{value // 2**20} MiB" if value >= 2**20 else f"{value // 2**10} KiB"
    return f"{value:,g} {unit}".strip() if value < 10_000 else f"{value:,} {unit}".strip()
