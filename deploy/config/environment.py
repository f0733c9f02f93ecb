"""The environment of a command: variables, cores, and the model that is served if none is named. No pydantic, because
every command line reads it."""

import os
from pathlib import Path

from baton.errors import ConfigError

DEFAULT_MODEL = "smollm2-135m"
SECRET_VARIABLE = "BATON_CLUSTER_SECRET"
"""Environment variable with the secret of the cluster that a command reaches by --target."""


def prepare_ray_environment(*, asks_token: bool, token: Path | None = None, is_local: bool = False) -> None:
    """Set Ray's environment variables; call it before ray is imported.

    `asks_token` says whether that Ray refuses callers without its token, `token` names a file with it. What the
    operator has set stays: the mode, RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH. With `is_local`, Ray listens on the loopback
    interface alone. Ray sends no statistics, and prints nothing about a worker that died: its supervisor reports that
    in one line. Workers of a Ray that is started from here have the launcher's priority, not Ray's lower one: they are
    what the machine is for.
    """
    os.environ.setdefault("RAY_worker_niceness", "0")
    os.environ.update(
        RAY_USAGE_STATS_ENABLED="0",
        RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0",
        RAY_DEDUP_LOGS_SKIP_REGEX="^A worker died or was killed while executing a task",
    )
    if asks_token:
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    if token is not None and not {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys():
        os.environ["RAY_AUTH_TOKEN_PATH"] = str(token)
    if is_local:  # despite its name: whether Ray looks for another address of this node than 127.0.0.1, on any system
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")


def ray_auth_mode() -> str:
    """Return what the operator has chosen for Ray: "token", "disabled", or an empty text for no choice."""
    return os.environ.get("RAY_AUTH_MODE", "").strip().lower()


def read_variable(name: str) -> str:
    """Return the value of an environment variable, which holds a secret. Raises ConfigError when it is unset or
    empty."""
    value = os.environ.get(name, "").strip()
    if not value:
        raise ConfigError(f"environment variable {name} is not set: export it")
    return value


def use_threads(num_threads: int) -> int:
    """Return the number of threads to use: `num_threads`, or one for each core when it is 0."""
    return num_threads or os.cpu_count() or 1
