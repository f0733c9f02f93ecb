"""Writes files atomically. Readers never see an incomplete file, even if the writer is killed or several processes
write the same file."""

import contextlib
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_ABANDONED_S = 3600.0
"""Age in seconds after which a partial file is removed. A partial file that was not written to for this time is assumed
to belong to a killed process."""


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Context manager that yields the path of a temporary file to write. When the `with` block ends without an error,
    the temporary file replaces `path`. Partial files of `path` that killed processes left are removed."""
    for left in path.parent.glob(f"{path.name}.*.partial"):
        with contextlib.suppress(FileNotFoundError):  # another writer has removed or renamed it
            if time.time() - left.stat().st_mtime > _ABANDONED_S:
                left.unlink()
    partial = path.with_name(f"{path.name}.{uuid.uuid4().hex}.partial")
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
