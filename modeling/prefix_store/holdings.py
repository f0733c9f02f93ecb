"""What a prefix store holds, for those who watch it."""

from dataclasses import dataclass

COUNTED_S = 30.0
"""Seconds for which a count of the bytes on disk holds."""


@dataclass(frozen=True)
class Holdings:
    """What a store holds, including files that are being written."""

    num_blocks: int
    num_bytes: int
    limit_bytes: int
    num_disk_bytes: int = 0
    """Bytes of the store below, on disk, when they were counted last; 0 without one. Counted each COUNTED_S."""
    limit_disk_bytes: int = 0
    disk_fault: str = ""
    """Why the store below is not used, in one line; empty while it is."""
