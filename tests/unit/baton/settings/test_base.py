"""Settings say what is wrong with them, wherever their values come from, and travel as JSON."""

import math
from dataclasses import field, replace
from typing import Any

import pytest

from baton.errors import ConfigError
from baton.settings.base import Bytes, Count, Seconds, from_json, meaning_of, names_of, part_of, settings, to_json


@settings
class Limits:
    """What a role goes by."""

    num_rows: Count = 2
    """Rows."""
    wait_s: Seconds = 1.5
    """Seconds to wait."""
    num_bytes: Bytes = 0
    """Bytes."""
    stretch: float = 1.0
    """How much longer; inf: without end."""


@settings
class Section(Limits):
    """What a user writes."""

    num_groups: Count = 1
    """Groups."""


@settings
class Whole:
    """A table of sections, and one."""

    section: Section = field(default_factory=Section)
    named: dict[str, Section] = field(default_factory=dict)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"num_rows": 0}, "num_rows = 0 is wrong: input should be greater than or equal to 1"),
        ({"num_rows": 2.0}, "num_rows = 2.0 is wrong: input should be a valid integer"),
        ({"num_rows": True}, "num_rows = True is wrong: input should be a valid integer"),
        ({"wait_s": math.inf}, "wait_s = inf is wrong: input should be a finite number"),
        ({"num_bytes": "1XB"}, "num_bytes: '1XB' is not an amount of memory"),
        ({"num_rows": 0, "wait_s": 0}, "num_rows = 0 is wrong: .* \\(and 1 more\\)"),
        ({"num_row": 1}, "num_row is not a key: use one of num_groups, num_rows, wait_s, num_bytes, stretch"),
    ],
)
def test_a_wrong_field_is_named_with_its_value_and_a_remedy(values: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=f"^{text}"):
        Section(**values)
    with pytest.raises(ConfigError, match="num_rows = 0 is wrong"):
        replace(Section(), num_rows=0)


def test_values_by_position_are_checked_as_well() -> None:
    assert Limits(3, 0.5) == Limits(num_rows=3, wait_s=0.5)
    with pytest.raises(ConfigError, match="^num_rows = 0 is wrong"):
        Limits(0)
    too_many: list[Any] = [1, 1.0, 0, 1.0, "more"]
    with pytest.raises(ConfigError, match="got multiple values for argument"):
        Limits(*too_many)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('{"section": {"num_rows": 0}}', "^section.num_rows = 0 is wrong"),
        ('{"named": {"a": {"num_rows": 0}}}', "^named.a.num_rows = 0 is wrong"),
        ('{"named": {"a": {"num_row": 0}}}', "^named.a.num_row is not a key: use one of num_groups,"),
        ('{"section": 3}', "^section = 3 is wrong: section is a section, set its keys"),
    ],
)
def test_a_wrong_field_is_named_by_its_place(text: str, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        from_json(Whole, text)


def test_settings_survive_json() -> None:
    whole = Whole(Section(3, stretch=math.inf), {"a": Section(num_groups=4)})
    assert from_json(Whole, to_json(whole)) == whole
    assert from_json(Section, '{"num_bytes": "1KiB"}').num_bytes == 1024


def test_a_part_has_the_fields_of_its_class_only() -> None:
    part = part_of(Limits, Section(num_rows=5, num_groups=3))
    assert type(part) is Limits and part == Limits(num_rows=5)


def test_fields_are_read_with_their_meaning_own_ones_first() -> None:
    assert names_of(Section) == ["num_groups", "num_rows", "wait_s", "num_bytes", "stretch"]
    assert [meaning_of(Section, name) for name in ("num_groups", "num_rows")] == ["Groups.", "Rows."]
