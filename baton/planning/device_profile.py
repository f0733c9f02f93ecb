"""Temporary."""

from dataclasses import dataclass

from baton.planning.hardware import Hardware


@dataclass(frozen=True)
class DeviceProfile:
    """Device."""

    name: str
    hardware: Hardware
