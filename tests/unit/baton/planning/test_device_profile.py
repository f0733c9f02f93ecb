"""A profile of a device is read as it was written, and a damaged file is refused by name."""

import json
import math
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from baton.errors import ConfigError
from baton.planning.cost_model import LinkModel
from baton.planning.device_profile import DeviceProfile, load, nominal_core, nominal_gpu, save, slowest
from baton.planning.hardware import Hardware

RATES = Hardware(6e14, 4e14, LinkModel(1e-4, 3e9), memory_bandwidth=4e12, fixed_s=3e-5, issue_s=4e-4)
PROFILE = DeviceProfile("NVIDIA H200, share 0.5", "cuda", RATES, 4e12, 150 << 30, 3 << 30, is_measured=True)
UNLIMITED = DeviceProfile("abacus", "cpu", Hardware(1.0, 2.0, LinkModel(), scores_per_s=3.0), 4.0)
"""Infinite bandwidths, of a core and of the link."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return the path of a file with PROFILE."""
    save(PROFILE, tmp_path / "profile.json")
    return tmp_path / "profile.json"


def refusal(path: Path) -> str:
    """Return the error of loading the file, without the path with which it begins."""
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert str(caught.value).startswith(f"{path}: ")
    return str(caught.value).removeprefix(f"{path}: ")


@pytest.mark.parametrize("profile", [PROFILE, UNLIMITED, nominal_core(2), nominal_core(4), nominal_gpu("NVIDIA L4", 2)])
def test_a_profile_is_read_as_it_was_written(tmp_path: Path, profile: DeviceProfile) -> None:
    save(profile, tmp_path / "profile.json")
    assert load(tmp_path / "profile.json") == profile
    assert isinstance(load(tmp_path / "profile.json").hardware.link, LinkModel)


def test_a_profile_with_infinite_rates_is_strict_json(path: Path) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    save(UNLIMITED, path)
    assert json.loads(path.read_text(), parse_constant=refuse)["profile"]["hardware"]["scores_per_s"] == 3.0


def test_files_of_earlier_versions_with_infinite_rates_are_read(path: Path) -> None:
    path.write_text(json.dumps({"schema": 2, "profile": asdict(UNLIMITED)}))
    assert "Infinity" in path.read_text() and load(path) == UNLIMITED


def test_a_later_profile_replaces_an_earlier_one_whole(path: Path) -> None:
    save(UNLIMITED, path)
    assert load(path) == UNLIMITED
    assert list(path.parent.iterdir()) == [path]


def test_a_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    told = refusal(tmp_path / "none.json")
    assert told == "cannot be read (No such file or directory): make it readable, or delete it"
    assert refusal(tmp_path).startswith("cannot be read (Is a directory)")


@pytest.mark.parametrize(
    ("content", "told"),
    [
        pytest.param(b'{"schema": 2, "profile": {"name": "\xff"}}', "invalid unicode code point", id="not UTF-8"),
        pytest.param(b"", "EOF while parsing", id="empty"),
        pytest.param(b'{"schema": 2, "prof', "EOF while parsing a string", id="cut off"),
        pytest.param(b'["schema"]', "Input should be an object", id="a list"),
        pytest.param(b"null", "Input should be an object", id="nothing"),
        pytest.param(b"{}", "schema: Field required", id="no schema"),
        pytest.param(b'{"schema": 2}', "profile: Field required", id="no profile"),
        pytest.param(b'{"schema": 2, "profile": null}', "profile: Input should be an object", id="no fields"),
    ],
)
def test_what_is_no_profile_is_refused_by_name(path: Path, content: bytes, told: str) -> None:
    path.write_bytes(content)
    message = refusal(path)
    assert message.startswith("is not a device profile (") and message.endswith("): delete the file")
    assert told in message


@pytest.mark.parametrize("schema", [1, 3])
def test_another_schema_is_refused(path: Path, schema: int) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), "schema": schema}))
    assert refusal(path) == f"schema = {schema}, and this version reads 2: delete the file"


def put(fields: dict[str, Any], place: str, value: object) -> None:
    """Replace one field of a profile; ... leaves it out."""
    *sections, name = place.split(".")
    for section in sections:
        fields = fields[section]
    fields[name] = value
    if value is ...:
        del fields[name]


@pytest.mark.parametrize(
    ("place", "value", "told"),
    [
        ("name", ..., "name"),
        ("shared_bandwidth", ..., "shared_bandwidth"),
        ("hardware", ..., "hardware"),
        ("hardware.pair_flops", ..., "hardware.pair_flops"),
        ("hardware.link", ..., "hardware.link"),
        ("hardware", None, "hardware"),
        ("hardware", {}, "hardware.linear_flops"),
        ("hardware.link", 3, "hardware.link"),
        ("hardware.memory_bandwidth", "fast", "hardware.memory_bandwidth"),
        ("shared_bandwidth", "fast", "shared_bandwidth"),
        ("memory_bytes", 1.5, "memory_bytes"),
        ("memory_bytes", True, "memory_bytes"),
        ("is_measured", "perhaps", "is_measured"),
        ("shared_bandwidth", "1e9", "shared_bandwidth"),
        ("shared_bandwidth", 0, r"shared_bandwidth = 0(\.0)? is out of range: give a finite rate above 0"),
        ("shared_bandwidth", math.inf, "shared_bandwidth = inf is out of range"),
        ("shared_bandwidth", -1, r"shared_bandwidth = -1(\.0)? is out of range"),
        ("shared_bandwidth", math.nan, "shared_bandwidth = nan is out of range"),
        ("hardware.linear_flops", 0, r"linear_flops = 0(\.0)? is out of range: give a rate above 0"),
        ("hardware.pair_flops", -1, r"pair_flops = -1(\.0)? is out of range"),
        ("hardware.scores_per_s", 0, r"scores_per_s = 0(\.0)? is out of range"),
        ("hardware.memory_bandwidth", math.nan, "memory_bandwidth = nan is out of range"),
        ("hardware.link.bandwidth", 0, r"bandwidth = 0(\.0)? is out of range"),
        ("hardware.link.latency_s", -1, r"latency_s = -1(\.0)? is out of range"),
    ],
)
def test_a_damaged_field_is_refused_by_its_name(path: Path, place: str, value: object, told: str) -> None:
    data = json.loads(path.read_text())
    put(data["profile"], place, value)
    path.write_text(json.dumps(data))
    message = refusal(path)
    assert re.search(told, message) and message.startswith("is not a device profile (")


def test_fields_with_defaults_may_be_missing(path: Path) -> None:
    data = json.loads(path.read_text())
    for name in ("memory_bytes", "used_bytes", "is_measured"):
        del data["profile"][name]
    path.write_text(json.dumps(data))
    assert load(path) == replace(PROFILE, memory_bytes=0, used_bytes=0, is_measured=False)


def test_a_file_that_cannot_be_written_is_named_and_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "taken"
    (path / "inside").mkdir(parents=True)
    with pytest.raises(ConfigError, match="taken: cannot be written .*: make its folder writable"):
        save(PROFILE, path)
    assert list(tmp_path.iterdir()) == [path]


def test_writers_do_not_disturb_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, write_text = tmp_path / "file", Path.write_text

    def interrupted(partial: Path, text: str, **options: str) -> int:
        written = write_text(partial, text, encoding="utf-8")
        if PROFILE.name in text:
            save(UNLIMITED, path)
        return written

    monkeypatch.setattr(Path, "write_text", interrupted)
    save(PROFILE, path)
    assert load(path) == PROFILE
    assert list(tmp_path.iterdir()) == [path]


def test_the_slowest_computes_least() -> None:
    slower = replace(PROFILE, hardware=replace(RATES, linear_flops=5e14))
    assert slowest([PROFILE, slower, PROFILE]) is slower
    assert slowest([]) is None


def test_a_profile_says_its_rates_and_where_they_are_from() -> None:
    assert str(PROFILE) == (
        "NVIDIA H200, share 0.5: 600,000 GFLOP/s in matrices, 400,000 in attention, reads 4,000 GB/s (measured)"
    )
    assert str(nominal_core(2)).endswith(": 210 GFLOP/s in matrices, 165 in attention, reads 10 GB/s (nominal)")
    assert str(nominal_gpu("", 2)).startswith("unknown GPU, taken for L4: ")
