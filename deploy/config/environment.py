"""Environment of a command: variables, cores, and the name of the default model. This module does not import pydantic,
because every command imports it and must start quickly."""

import os
from collections.abc import Sequence
from pathlib import Path

from baton.errors import ConfigError

DEFAULT_MODEL = "smollm2-135m"
SECRET_VARIABLE = "BATON_CLUSTER_SECRET"
"""Environment variable with the secret of the cluster to which a command with the option --target connects."""

_VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"


def prepare_ray_environment(*, asks_token: bool, token: Path | None = None, is_local: bool = False) -> None:
    """Set Ray's environment variables. Must be called before `ray` is imported.

    - `asks_token`: true if Ray refuses callers without its authentication token.
    - `token`: path of the file with the token; None if the token is not known.
    - `is_local`: true if Ray must listen on the loopback interface only.

    Values of RAY_AUTH_MODE, RAY_AUTH_TOKEN and RAY_AUTH_TOKEN_PATH that the operator has set are not changed. Ray's
    usage statistics are turned off. Ray's messages about workers that died are suppressed, because the supervisor
    reports them in one line. If Ray is started here, its workers run at the launcher's priority instead of Ray's lower
    default, because serving is the machine's main task.
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


def visible_gpus() -> str | None:
    """Return the value of CUDA_VISIBLE_DEVICES: the indices or UUIDs of the GPUs that this process and its children may
    use, separated by commas. None: the variable is not set, and all GPUs may be used."""
    return os.environ.get(_VISIBLE_GPUS)


def restrict_gpus(uuids: Sequence[str]) -> None:
    """Let this process, and the processes that it starts from now on, use only the GPUs with these UUIDs."""
    os.environ[_VISIBLE_GPUS] = ",".join(uuids)


def ray_auth_mode() -> str:
    """Return the authentication mode that the operator has set for Ray: "token", "disabled", or "" if it is not set."""
    return os.environ.get("RAY_AUTH_MODE", "").strip().lower()


def read_variable(name: str) -> str:
    """Return the value of an environment variable that contains a secret. Raises ConfigError if the variable is not set
    or empty."""
    value = os.environ.get(name, "").strip()
    if not value:
        raise ConfigError(f"environment variable {name} is not set: export it")
    return value


def use_threads(num_threads: int) -> int:
    """Return the number of threads to use: `num_threads` or, if `num_threads` is 0, the number of cores."""
    return num_threads or os.cpu_count() or 1


def mps_percentage() -> str:
    """Return the percentage of a GPU's processors that CUDA MPS lets this process use; empty if it sets none."""
    return os.environ.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "")
