"""The environment of a command: variables, cores, and the name of the default model. Imports no pydantic, because every
command imports it."""

import os
from pathlib import Path

from baton.errors import ConfigError

DEFAULT_MODEL = "smollm2-135m"
SECRET_VARIABLE = "BATON_CLUSTER_SECRET"
"""Environment variable with the secret of the cluster that a command reaches by --target."""


def prepare_ray_environment(*, asks_token: bool, token: Path | None = None, is_local: bool = False) -> None:
    """Set Ray's environment variables; call it before ray is imported.

    `asks_token` is true if that Ray refuses callers without its token. `token` is the path of a file with the token.
    Variables that the operator has set are kept: RAY_AUTH_MODE, RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH. With `is_local`,
    Ray listens on the loopback interface only. Ray sends no usage statistics, and prints nothing about a worker that
    died: the supervisor reports that in one line. Workers of a Ray that is started here run at the launcher's priority
    instead of Ray's lower default, because serving is the machine's main task.
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
    if is_local:  # despite its name, it works on all systems: 0 keeps this node's address at 127.0.0.1
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")


def ray_auth_mode() -> str:
    """Return the authentication mode that the operator has set for Ray: "token", "disabled", or "" if it is not set."""
    return os.environ.get("RAY_AUTH_MODE", "").strip().lower()


def read_variable(name: str) -> str:
    """Return the value of an environment variable that holds a secret. Raises ConfigError if it is unset or empty."""
    value = os.environ.get(name, "").strip()
    if not value:
        raise ConfigError(f"environment variable {name} is not set: export it")
    return value


def use_threads(num_threads: int) -> int:
    """Return the number of threads to use: `num_threads`, or the number of cores if it is 0."""
    return num_threads or os.cpu_count() or 1
