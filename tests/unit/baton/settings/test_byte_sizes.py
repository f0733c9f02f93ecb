"""Amounts of memory as people write them."""

import pytest

from baton.errors import ConfigError
from baton.settings.byte_sizes import parse_bytes, parse_rate
from deploy.config.file import format_config, load_config


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *(("0", 0), (" 7 B ", 7), ("2 kB", 2000), ("0.1 MB", 100_000), ("2 GB", 2 * 10**9), ("2 TB", 2 * 10**12)),
        *(("512MiB", 1 << 29), ("1.5 GiB", 3 << 29)),
    ],
)
def test_text_with_a_unit(text: str, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("value", [5, 5.0, True, None])
def test_what_is_no_text_is_left_to_others(value: object) -> None:
    assert parse_bytes(value) is value


@pytest.mark.parametrize("text", ["", "GiB", "1XB", "-1GiB", "1 GiB more", "1gib", "9" * 400, "\u0663"])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not an amount of memory: use a number"):
        parse_bytes(text)


def test_a_configuration_takes_amounts_and_repeats_them_in_bytes() -> None:
    config = load_config(None, ["generate.kv_memory_bytes=1GiB", "generate.residency=host"])
    assert (config.generate.kv_memory_bytes, config.generate.residency) == (1 << 30, "host")
    assert f"kv_memory_bytes = {1 << 30}\n" in format_config(config)


@pytest.mark.parametrize("value", ["1XB", "-5", "1.5"])
def test_a_wrong_amount_names_its_key(value: str) -> None:
    with pytest.raises(ConfigError, match=r"^generate\.kv_memory_bytes"):
        load_config(None, [f"generate.kv_memory_bytes={value}"])


@pytest.mark.parametrize(("text", "expected"), [("25GBps", 25 * 10**9), ("4 GB/s", 4 * 10**9), ("1.5GiBps", 3 << 29)])
def test_rates(text: str, expected: int) -> None:
    assert parse_rate(text) == expected
    assert load_config(None, [f"device.link={text}"]).device.link == expected


@pytest.mark.parametrize("text", ["25GB", "fast", "GBps", "25Gbps"])
def test_what_is_no_rate_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="device.link"):
        load_config(None, [f"device.link={text}"])
