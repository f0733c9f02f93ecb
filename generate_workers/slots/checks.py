"""Limits on what a caller may ask of slots. Each check raises InvalidArgumentError that names the field.

`SlotTable` calls these checks before it reserves or renews a lease.
"""

import math

from baton.errors import InvalidArgumentError
from transport.kv_sink import ReserveSpec


def check_spec(request: ReserveSpec, num_slots: int, max_slot_tokens: int) -> None:
    """Check a Reserve against a group of `num_slots` slots that hold `max_slot_tokens` tokens each."""
    num_tokens, capacity, num_choices = request.num_tokens, request.capacity_tokens, request.num_choices
    _require(num_tokens >= 1, "num_tokens", num_tokens, "use at least 1")
    _require(num_tokens <= capacity, "num_tokens", num_tokens, f"capacity_tokens is {capacity}")
    most = f"a slot of this group holds at most {max_slot_tokens}"
    _require(capacity <= max_slot_tokens, "capacity_tokens", capacity, most)
    check_ttl(request.ttl_s)
    _require(1 <= num_choices <= num_slots, "n", num_choices, f"this group has {num_slots} slots")


def check_ttl(ttl_s: float) -> None:
    """Check that a lease's time to live is finite and above 0 seconds."""
    _require(0 < ttl_s < math.inf, "ttl_s", ttl_s, "use a time above 0 seconds")


def _require(holds: bool, name: str, value: object, remedy: str) -> None:
    if not holds:
        raise InvalidArgumentError(f"{name} = {value!r} is out of range: {remedy}")
