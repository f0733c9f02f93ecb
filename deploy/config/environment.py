"""The environment of a command: variables, cores, and the model that is served if none is named. No pydantic, because
every command line reads it."""

import os

from baton.errors import ConfigError

DEFAULT_MODEL = "smollm2-135m"
SECRET_VARIABLE = "BATON_CLUSTER_SECRET"
"""Environment variable with the secret of the cluster that a command reaches by --target."""


def prepare_ray_environment() -> None:
    """Set Ray's environment variables; call it before ray is imported. Ray then writes no token to the user's home,
    sends no statistics, and prints nothing about either, nor about a worker that died: its supervisor reports that in
    one line."""
    os.environ.update(
        RAY_AUTH_MODE="disabled",
        RAY_USAGE_STATS_ENABLED="0",
        RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0",
        RAY_DEDUP_LOGS_SKIP_REGEX="^A worker died or was killed while executing a task",
    )


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
