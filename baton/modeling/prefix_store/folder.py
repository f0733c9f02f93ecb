"""Folder of a node's cached prefixes. Its first user creates it, its last user removes it, and it is reused after a
crash.

`node` holds a folder for each worker. A user of the folder holds a shared lock on it until it closes the folder or its
process ends in any way: the kernel then releases the lock. So a process that gets the exclusive lock knows that the
folder has no users. The last user removes the folder, and a worker that starts removes the folders that killed clusters
left on its node. A folder whose name is used again is reused as it is, because each file's name identifies its content.
In a file system that all users share, another user may have taken a folder's name. Such a folder is never used, and
workers that have the same key take the same other name.

This module does not know the files in the folder. Any process of the node may use it. It blocks only while another
process removes a folder.
"""

import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import resource
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from baton.errors import ConfigError

logger = logging.getLogger(__name__)

_MAX_FILES = 16_384
"""Maximum number of open files. A job or a lease holds one file open for each cached block with which it begins."""
MEMORY = Path("/dev/shm")
"""Path of the file system whose files are memory."""
_KIND = "baton-prefixes"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_POLL_S = 0.05
_MOST_NAMES = 8
"""Number of names that are tried for a folder."""
_REMEDY = "make room for it, or set prefill.prefix_share to 0"


def node_folder(cluster: str, parent: Path | None = None) -> Path:
    """Return the folder in which a cluster's workers keep prefixes on their node, one for each cluster name and user.

    It is in memory, or below `parent`. Below `parent` each boot has its own folder, because a file that a crash
    truncated may look complete.
    """
    name = f"{_KIND}-{os.geteuid()}-{cluster}"
    return MEMORY / name if parent is None else parent / f"{name}-{boot_id()}"


def boot_id() -> str:
    """Return the id of this node's current boot."""
    return _BOOT_ID.read_text().strip()


def share_bytes(share: float, path: Path = MEMORY) -> int:
    """Return the fraction `share` of the capacity, in bytes, of the file system of `path`. Raises ConfigError when
    `path` cannot be used."""
    try:
        disk = os.statvfs(path)
    except OSError as error:
        raise ConfigError(f"prefix store: {path} cannot be used ({error.strerror}): {_REMEDY}") from error
    return int(share * disk.f_blocks * disk.f_frsize)


def allow_files() -> None:
    """Raise this process's limit on open files to the number that blocks may need, or to the hard limit if that is
    lower."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MAX_FILES if hard == resource.RLIM_INFINITY else min(_MAX_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


class StoreFolder:
    """One process's shared lock on a folder of this user, which is made if it does not exist. Not thread-safe."""

    def __init__(self, path: Path, key: str = "") -> None:
        """Lock the folder `path`. If another user has created a folder with that name, use a name that is derived from
        `key`, so that only processes with the key can compute it. Raises ConfigError when no folder can be created."""
        first: OSError | None = None
        for self.path in _names(path, key):
            try:
                self._file = _lock_shared(self.path)
            except OSError as error:
                first = first or error
            else:
                return
        assert first is not None
        raise ConfigError(f"prefix store: {path} cannot be used ({first.strerror}): {_REMEDY}") from first

    def close(self) -> None:
        """Release the folder. The last user also removes it. Call once."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # if several try at once, one succeeds
            shutil.rmtree(self.path)
        except BlockingIOError:
            logger.debug("others use %s", self.path)
        except OSError as error:
            logger.warning("%s could not be removed: %s", self.path, error)
        finally:
            os.close(self._file)


def sweep(parent: Path = MEMORY) -> None:
    """Remove this user's folders in `parent` that no process uses. Folders that cannot be removed stay."""
    for path in parent.glob(f"{_KIND}-{os.geteuid()}-*"):
        _remove_unused(path)


def remove_left(path: Path, within_s: float = 5.0) -> None:
    """Remove the folder of processes that have ended or were killed, once they have released it. A process that seems
    to have ended may still have running threads that hold locks. Blocks. If the folder is still used after `within_s`
    seconds, it is not removed."""
    deadline_s, pause = time.monotonic() + within_s, threading.Event()
    while not _remove_unused(path) and time.monotonic() < deadline_s:
        pause.wait(_POLL_S)


def _remove_unused(path: Path) -> bool:
    """Remove the folder if it is this user's and no process uses it. Return False if a process uses it."""
    try:
        file = _open(path)
    except OSError as error:
        logger.debug("%s is not removed: %s", path, error)
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path)
        logger.info("removed %s, which a cluster had left", path)
    except BlockingIOError:
        return False
    except FileNotFoundError:
        logger.debug("another process removed %s", path)
    except OSError as error:
        logger.warning("%s could not be removed: %s", path, error)
    finally:
        os.close(file)
    return True


def _names(path: Path, key: str) -> Iterator[Path]:
    """Yield the paths to try for a folder: the path itself, then others that cannot be guessed without the key."""
    yield path
    for number in range(1, _MOST_NAMES):
        suffix = hashlib.blake2b(f"{path.name} {number}".encode(), key=key.encode(), digest_size=8).hexdigest()
        yield path.with_name(f"{path.name}-{suffix}")


def _lock_shared(path: Path) -> int:
    """Return a descriptor of the folder that holds the shared lock. Makes the folder if it does not exist. Raises
    OSError."""
    while True:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            file = _open(path)
        except FileNotFoundError:
            continue  # removed by its last user, just now
        fcntl.flock(file, fcntl.LOCK_SH)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file), path.stat(follow_symlinks=False)):
                return file
        os.close(file)


def _open(path: Path) -> int:
    """Return a descriptor of a folder that only this user can access. Raises PermissionError for any other folder, and
    OSError."""
    file = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    stat = os.fstat(file)
    if stat.st_uid == os.geteuid() and not stat.st_mode & 0o077:
        return file
    os.close(file)
    raise PermissionError(errno.EPERM, "it is not a folder of this user's alone", str(path))
