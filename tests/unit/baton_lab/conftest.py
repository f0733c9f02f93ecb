"""Fixture for the rates of this machine, which has no GPU in these tests."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from baton.planning.device_profile import DeviceProfile, save
from baton.planning.hardware import Hardware


@pytest.fixture
def keep_core(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Hardware], None]:
    """Return a function that keeps rates as if they had been measured on one core. This machine has no GPU."""
    from deploy.machine import device_profile, this_machine

    monkeypatch.setattr(this_machine, "gpu_name", lambda: "")
    monkeypatch.setattr(device_profile, "cpu_quota", lambda: math.inf)

    def keep(rates: Hardware) -> None:
        path = device_profile.kept_path("cpu", 2)
        path.parent.mkdir(parents=True, exist_ok=True)
        save(DeviceProfile("CPU core", "cpu", rates, rates.memory_bandwidth, is_measured=True), path)

    return keep
