"""Folder for a node's cached prefixes. The first process that uses the folder creates it, and the last one removes it.

Each worker of the node opens the folder through `baton.modeling.prefix_store.node`. A process that uses the folder
holds a shared lock on it. The kernel releases the lock when the process ends, even after a crash. A process that gets
the exclusive lock therefore knows that no other process uses the folder.

A worker that starts removes folders that killed clusters left on its node. If a folder with the same name still exists
after a crash, it is reused with its files, because the name of each file identifies the file's content.

In a file system that several users share, another user may own a folder with the same name. Such a folder is never
used. Workers then use an alternative name, which is derived from a secret key that they share.

This module does not depend on the files in the folder. Any process of the node may use it. It blocks only while another
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
"""Maximum number of open files. A prefill job or a lease on a slot keeps one file open for each cached block that it
starts with."""
MEMORY = Path("/dev/shm")
"""Path of a file system that stores its files in memory."""
_KIND = "baton-prefixes"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_POLL_S = 0.05
_MOST_NAMES = 8
"""Maximum number of folder names that are tried before ConfigError is raised."""
_REMEDY = "make room for it, or set prefill.prefix_share to 0"


def node_folder(cluster: str, parent: Path | None = None) -> Path:
    """Return the path of the folder in which the workers of a cluster cache prefixes on their node. Each cluster name
    and each user has a separate folder.

    If `parent` is None, the folder is in memory (`MEMORY`). Otherwise it is in `parent`, and its name contains the boot
    id. A folder on disk is not reused after a reboot, because a file that a crash truncated may look complete.
    """
    name = f"{_KIND}-{os.geteuid()}-{cluster}"
    return MEMORY / name if parent is None else parent / f"{name}-{boot_id()}"


def boot_id() -> str:
    """Return the kernel's id of the current boot. The id changes whenever the node is restarted."""
    return _BOOT_ID.read_text().strip()


def share_bytes(share: float, path: Path = MEMORY) -> int:
    """Return the number of bytes that is the fraction `share` (0 to 1) of the size of the file system that contains
    `path`. Raises ConfigError if `path` cannot be used."""
    try:
        disk = os.statvfs(path)
    except OSError as error:
        raise ConfigError(f"prefix store: {path} cannot be used ({error.strerror}): {_REMEDY}") from error
    return int(share * disk.f_blocks * disk.f_frsize)


def allow_files() -> None:
    """Raise this process's soft limit on open files to `_MAX_FILES`, or to the hard limit if the hard limit is
    lower."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MAX_FILES if hard == resource.RLIM_INFINITY else min(_MAX_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


class StoreFolder:
    """Shared lock of this process on a folder. The folder belongs to this user, and is created if it does not exist.
    Not thread-safe."""

    def __init__(self, path: Path, key: str = "") -> None:
        """Lock the folder `path`, and create it if it does not exist.

        If a folder with that name belongs to another user, an alternative name is derived from `key`. Only processes
        that have the key can compute the alternative name. Raises ConfigError if no folder can be created.
        """
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
        """Release the lock on the folder, and remove the folder if no other process uses it. Call once."""
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
    """Remove this user's prefix folders in `parent` that no process uses. A folder that cannot be removed is
    skipped."""
    for path in parent.glob(f"{_KIND}-{os.geteuid()}-*"):
        _remove_unused(path)


def remove_left(path: Path, within_s: float = 5.0) -> None:
    """Remove the folder of processes that have ended, as soon as no process uses it.

    Waits for at most `within_s` seconds, because a process that seems to have ended may still have threads that hold a
    lock on the folder. If the folder is still in use after that time, it is not removed.
    """
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
