"""Check for the optional packages of the extra `lab`, which only `baton_lab` needs."""

import importlib

from baton.errors import ConfigError


def require(package: str, option: str) -> None:
    """Check that `package` is installed, which the option `option` needs. Raises ConfigError otherwise; its message
    names the extra to install."""
    try:
        importlib.import_module(package)
    except ImportError as error:
        raise ConfigError(f"{option} needs {package}: run `pip install 'baton-serve[lab]'`") from error
