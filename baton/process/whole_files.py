"""Writes files atomically: a file appears complete or not at all, even if its writer is killed or several processes
write it at once."""

import contextlib
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_ABANDONED_S = 3600.0
"""Seconds without a write after which the writer of a partial file is assumed to have been killed."""


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Yield the path of a temporary file to write. It replaces `path` once the `with` block has ended without an error.
    Also removes partial files of `path` whose writers were killed."""
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
