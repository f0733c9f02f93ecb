"""Shares small files of the supervisor's node with other nodes: calibrations and step times. The text of a file is kept
in Ray's key-value store under the file's name. It is written to the path at which a process of another node looks for
the file.

Workers read these files when they start. A supervisor that was moved to another node reads them before it starts the
orchestrator. Blocks on Ray's store and on the disk.
"""

import logging
from pathlib import Path

from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_put

from baton.process.whole_files import whole
from baton.settings.paths import cache_folder

logger = logging.getLogger(__name__)

_PREFIX = "baton-file:"


def keep_file(namespace: str, path: Path) -> None:
    """Store the content of a file for other nodes of the cluster with that namespace. Content that was stored under the
    same name is replaced. Does nothing if the file does not exist."""
    if path.is_file():
        _internal_kv_put(_PREFIX + path.name, path.read_bytes(), namespace=namespace)


def file_here(namespace: str, path: Path) -> Path:
    """Return the path of a file on this node. If `path` does not exist here, write a copy of the content that was kept
    under its name, and return the path of the copy: `path` itself if it is below this node's cache folder, else a path
    in that folder. If no content was kept, or the copy cannot be written (which is logged), return `path`, although the
    file does not exist."""
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
    """Delete the files that are kept for a cluster that has ended. Does nothing if none are kept."""
    _internal_kv_del(_PREFIX, del_by_prefix=True, namespace=namespace)
