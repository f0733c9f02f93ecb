"""Settings of a prefill rank. Neither torch nor grpc: launchers read them, too."""

from typing import Literal

from baton.settings.base import Bytes, Seconds, settings

Transfer = Literal["auto", "stream"]
"""Route of KV to generation groups: auto, through shared memory where possible; stream, always over gRPC."""


@settings
class PrefillConfig:
    """Limits of a prefill rank."""

    watchdog_floor_s: Seconds = 2.0
    """Shortest time without progress, in seconds, after which a rank counts as stalled and its chain is relinked."""
    transfer: Transfer = "auto"
    """How KV reaches generation groups: auto, through shared memory on the same node, else gRPC; or stream, gRPC."""
    device_memory_bytes: Bytes = 0
    """Limit of weights and KV on each rank's device, like "1GiB", if it has memory of its own; 0: all of it."""
