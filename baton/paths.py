"""Where Baton keeps what it can make again."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """The user's cache folder (XDG_CACHE_HOME, else ~/.cache), `baton` below it."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "baton"
