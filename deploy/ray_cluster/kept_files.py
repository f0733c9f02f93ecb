"""Small files of the supervisor's node that other nodes lack: calibrations and step times. Their text is kept in Ray's
key-value store under the file's name, and written where a process looks for the file.

Workers read them when they start, a supervisor that was moved before it starts the orchestrator. Blocks on Ray's store
and on the disk.
"""

import logging
from pathlib import Path

from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_put

from baton.process.whole_files import whole
from baton.settings.paths import cache_folder

logger = logging.getLogger(__name__)

_PREFIX = "baton-file:"


def keep_file(namespace: str, path: Path) -> None:
    """Keep the content of a file for other nodes of the cluster with that namespace, replacing the content kept under
    the same name. Does nothing if the file does not exist."""
    if path.is_file():
        _internal_kv_put(_PREFIX + path.name, path.read_bytes(), namespace=namespace)


def file_here(namespace: str, path: Path) -> Path:
    """Return the path of a file on this node: `path` where there is one, else that of a copy of what was kept under its
    name, which is written for that: at `path` if that is below this node's cache folder. Return `path`, without a file,
    when nothing was kept or it cannot be written, which is logged."""
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
    """Delete what is kept for a cluster that has ended. Harmless when nothing was kept."""
    _internal_kv_del(_PREFIX, del_by_prefix=True, namespace=namespace)
