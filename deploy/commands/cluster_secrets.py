"""Stores the secrets of a cluster on the launcher's machine, in files that only the launcher's user can read.

The files are in a folder next to the cluster's record file. `baton serve` writes them before it starts any process, and
`ClusterRecord.remove` removes them. Operators' commands on this machine read the cluster's secret from its file
(`deploy.commands.record.secret_for`). docs/security.md lists all secrets.
"""

import contextlib
import os
import secrets
import shutil
import stat
from pathlib import Path

from baton.errors import ConfigError
from baton.transport.identity import ClusterSecret

_CLUSTER, _RAY = "cluster_secret", "ray_token"
_MOST_BYTES = 4096


def keep_secrets(record: Path, secret: ClusterSecret) -> Path:
    """Write the secret of the cluster whose record file is `record`, and a new authentication token for its Ray.
    Existing files are replaced. Return the path of the token's file. Raises ConfigError if the files cannot be
    written."""
    folder = _folder(record)
    try:
        remove_secrets(record)
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700)
        _write(folder / _CLUSTER, secret.text)
        _write(token_path(record), secrets.token_hex(32))
    except OSError as error:
        raise ConfigError(f"{folder} cannot be made for the cluster's secrets ({error.strerror}): remove it") from error
    return token_path(record)


def token_path(record: Path) -> Path:
    """Return the path of the file with Ray's authentication token. `record` is the record file of the cluster for which
    Ray was started."""
    return _folder(record) / _RAY


def load_secret(record: Path) -> ClusterSecret:
    """Return the secret of the cluster whose record file is `record`. Raises ConfigError if the secret does not exist,
    or if another user could have read or written it."""
    path = _folder(record) / _CLUSTER
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), encoding="ascii") as file:
            status = os.fstat(file.fileno())
            text = file.read(_MOST_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "is not ASCII"
        raise ConfigError(f"{path} cannot be read ({why}): run this as the user who started the cluster") from error
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise ConfigError(f"{path} belongs to another user or is open to others: stop the cluster, and start it again")
    return ClusterSecret(text.strip())


def remove_secrets(record: Path) -> None:
    """Remove the secrets of the cluster whose record file is `record`. Does nothing if no secrets are stored."""
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(_folder(record))


def _folder(record: Path) -> Path:
    return record.with_suffix(".secrets")


def _write(path: Path, text: str) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "w") as file:
        file.write(text)
