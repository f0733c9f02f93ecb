"""A profile of a device is read as it was written, and a damaged file is refused by name."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from baton.errors import ConfigError
from baton.planning.cost_model import LinkModel
from baton.planning.device_profile import DeviceProfile, load, nominal_core, nominal_gpu, save, slowest
from baton.planning.hardware import Hardware

RATES = Hardware(6e14, 4e14, LinkModel(1e-4, 3e9), memory_bandwidth=4e12, fixed_s=3e-5, issue_s=4e-4)
PROFILE = DeviceProfile("NVIDIA H200, share 0.5", "cuda", RATES, 4e12, 150 << 30, 3 << 30, is_measured=True)


@pytest.mark.parametrize("profile", [PROFILE, nominal_core(2), nominal_core(4), nominal_gpu("NVIDIA L4", 2)])
def test_a_profile_is_read_as_it_was_written(tmp_path: Path, profile: DeviceProfile) -> None:
    save(profile, tmp_path / "profile.json")
    assert load(tmp_path / "profile.json") == profile


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"kind": "other"}, "is not a baton-device-profile file"),
        ({"schema": 2}, "schema = 2, and this version reads 1: recreate the file"),
        ({"hardware": {}}, "is not a complete profile .*: delete the file"),
        ({"hardware": None}, "is not a complete profile"),
        ({"shared_bandwidth": "fast"}, "is not a complete profile"),
        ({"shared_bandwidth": 0}, "shared_bandwidth = 0 is out of range: give a rate above 0"),
    ],
)
def test_a_damaged_file_is_refused_by_name(tmp_path: Path, change: dict[str, object], told: str) -> None:
    path = tmp_path / "profile.json"
    save(PROFILE, path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ConfigError, match=f"profile.json: {told}"):
        load(path)


def test_rates_of_a_file_are_above_zero(tmp_path: Path) -> None:
    save(PROFILE, tmp_path / "profile.json")
    text = (tmp_path / "profile.json").read_text().replace("600000000000000.0", "-1")
    (tmp_path / "profile.json").write_text(text)
    with pytest.raises(ConfigError, match="linear_flops = -1 is out of range"):
        load(tmp_path / "profile.json")


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
