"""Token ranges and KV layouts: the arithmetic that all parts share."""

from dataclasses import replace

import pytest

from baton.types import KvLayout, TokenRange

LAYOUT = KvLayout("weights", num_layers=30, num_kv_heads=3, head_dim=64, dtype="bfloat16")


def test_standard_model_takes_23040_bytes_a_token() -> None:
    assert LAYOUT.row_bytes == 768
    assert LAYOUT.token_bytes == 23_040


@pytest.mark.parametrize(
    "change",
    [{"model_fingerprint": "x"}, {"num_layers": 29}, {"num_kv_heads": 9}, {"head_dim": 32}, {"dtype": "float32"}],
)
def test_fingerprint_tells_any_two_layouts_apart(change: dict[str, object]) -> None:
    assert replace(LAYOUT, **change).fingerprint != LAYOUT.fingerprint  # type: ignore[arg-type]


def test_fingerprint_is_a_function_of_the_values() -> None:
    assert replace(LAYOUT).fingerprint == LAYOUT.fingerprint


@pytest.mark.parametrize(("length", "size", "expected"), [(10, 4, [4, 4, 2]), (8, 4, [4, 4]), (0, 4, []), (3, 9, [3])])
def test_split_covers_a_range_in_order(length: int, size: int, expected: list[int]) -> None:
    parts = TokenRange(5, 5 + length).split(size)
    assert [len(part) for part in parts] == expected
    assert [p.start for p in parts[1:]] == [p.end for p in parts[:-1]]


def test_a_reversed_range_is_our_own_bug() -> None:
    with pytest.raises(AssertionError):
        TokenRange(3, 2)
