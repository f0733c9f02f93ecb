"""Shares small files of the supervisor's node with other nodes: calibrations and step times. The content of a file is
stored in Ray's key-value store under the file's name. On another node, it is written to the path at which a process
looks for the file.

Workers read these files when they start. A supervisor that was moved to another node reads them before it starts the
orchestrator. Functions block on Ray's store and on the disk.
"""

import logging
from pathlib import Path

from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_put

from baton.process.whole_files import whole
from baton.settings.paths import cache_folder

logger = logging.getLogger(__name__)

_PREFIX = "baton-file:"


def keep_file(namespace: str, path: Path) -> None:
    """Store the content of the file `path` in Ray for other nodes of the cluster `namespace`. Content that was stored
    under the same file name is replaced. Does nothing if the file does not exist."""
    if path.is_file():
        _internal_kv_put(_PREFIX + path.name, path.read_bytes(), namespace=namespace)


def file_here(namespace: str, path: Path) -> Path:
    """Return the path on this node of a file that was stored by `keep_file`. Return `path` if it already exists on this
    node.

    Otherwise write the stored content to a file, and return its path. The file is `path` itself if `path` is below this
    node's cache folder; otherwise it is a file in the cache folder. If no content was stored, or if the file cannot be
    written (which is logged), return `path`, which does not exist.
    """
    if path.is_file():
        return path
    content: bytes | None = _internal_kv_get(_PREFIX + path.name, namespace=namespace)
    if content is None:
        return path
    here = path if path.is_relative_to(cache_folder()) else cache_folder() / "kept" / namespace / path.name
    try:
        here.parent.mkdir(parents=True, exist_ok=True)
        with whole(here) as partial:
            partial.write_bytes(content)
    except OSError as error:
        logger.warning("%s is done without, because a copy cannot be written (%s)", path, error)
        return path
    return here


def forget_files(namespace: str) -> None:
    """Delete all files that are stored in Ray for a cluster that has ended. Does nothing if no files are stored."""
    _internal_kv_del(_PREFIX, del_by_prefix=True, namespace=namespace)
