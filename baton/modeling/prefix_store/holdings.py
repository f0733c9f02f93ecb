"""Numbers of blocks and bytes in a prefix store, for monitoring."""

from dataclasses import dataclass

COUNTED_S = 30.0
"""Seconds for which a count of the bytes on disk is reused."""


@dataclass(frozen=True)
class Holdings:
    """Contents of a store in numbers, including files that are being written."""

    num_blocks: int
    num_bytes: int
    limit_bytes: int
    num_disk_bytes: int = 0
    """Bytes of the store on disk at the last count, which is made at most once in COUNTED_S seconds; 0 without a store
    on disk."""
    limit_disk_bytes: int = 0
    disk_fault: str = ""
    """Reason why the store on disk is not used, in one line. Empty while it is used."""
