"""Settings of a prefill rank. Neither torch nor grpc: launchers read them, too."""

from baton.settings.base import Seconds, settings


@settings
class PrefillConfig:
    """Limits of a prefill rank."""

    watchdog_floor_s: Seconds = 2.0
    """Shortest time without progress, in seconds, after which a rank counts as stalled and its chain is linked anew."""
