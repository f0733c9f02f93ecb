"""Files that appear whole or not at all, also when their writer is killed, or several write at once."""

import contextlib
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_ABANDONED_S = 3600.0
"""Seconds without a write after which the writer of a partial file counts as killed."""


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Yield the path of a file to write. It replaces `path` once the `with` body has ended without an error. Removes
    partial files that killed writers of `path` left in its folder."""
    for left in path.parent.glob(f"{path.name}.*.partial"):
        with contextlib.suppress(FileNotFoundError):  # another writer has removed it, or is done
            if time.time() - left.stat().st_mtime > _ABANDONED_S:
                left.unlink()
    partial = path.with_name(f"{path.name}.{uuid.uuid4().hex}.partial")
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
