"""Packages of the extra `lab`, which only `baton_lab` needs."""

import importlib

from baton.errors import ConfigError


def require(package: str, option: str) -> None:
    """Raise ConfigError, which names the extra, if the package that `option` needs is not installed."""
    try:
        importlib.import_module(package)
    except ImportError as error:
        raise ConfigError(f"{option} needs {package}: run `pip install 'baton-serve[lab]'`") from error
