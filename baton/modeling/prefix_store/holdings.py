"""Numbers of blocks and bytes in a prefix store, for monitoring."""

from dataclasses import dataclass

COUNTED_S = 30.0
"""Minimum time in seconds between two counts of the bytes on disk. The result of the last count is used in between."""


@dataclass(frozen=True)
class Holdings:
    """Numbers of blocks and bytes in a prefix store, and their limits. Files that are still being written are
    included."""

    num_blocks: int
    num_bytes: int
    limit_bytes: int
    num_disk_bytes: int = 0
    """Number of bytes in the store on disk at the last count. 0 if there is no store on disk. The bytes are counted at
    most once in COUNTED_S seconds."""
    limit_disk_bytes: int = 0
    disk_fault: str = ""
    """Reason why the store on disk is not used, in one line. Empty while it is used."""
