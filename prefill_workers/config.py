"""Settings of a prefill rank. Imports neither torch nor grpc, because launchers read the settings too."""

from typing import Literal

from baton.settings.base import Bytes, Seconds, settings

Transfer = Literal["auto", "stream"]
"""Transport of KV from prefill ranks to generation groups. "auto" uses shared memory where possible and gRPC otherwise.
"stream" always uses gRPC."""


@settings
class PrefillConfig:
    """Limits and timeouts of a prefill rank."""

    watchdog_floor_s: Seconds = 2.0
    """Minimum seconds without progress before a rank counts as stalled and its group gets new links."""
    transfer: Transfer = "auto"
    """Transport of KV to generation groups: shared memory on the same node, else gRPC (auto), or only gRPC (stream)."""
    device_memory_bytes: Bytes = 0
    """Maximum memory for weights and KV on each rank's device, for example "1GiB"; 0: all device memory."""
