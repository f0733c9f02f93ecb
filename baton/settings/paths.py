"""Cache folder of Baton. Its files can be deleted, because Baton can create them again."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return Baton's cache folder: $XDG_CACHE_HOME/baton, or ~/.cache/baton if the variable is not set. The folder may
    not exist."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "baton"
