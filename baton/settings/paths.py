"""Folder of files that Baton can make again."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return Baton's folder for caches: $XDG_CACHE_HOME/baton, else ~/.cache/baton; it may not exist yet."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "baton"
