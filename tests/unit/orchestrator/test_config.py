"""Every field is checked by name."""

from dataclasses import fields

import pytest

from baton.errors import ConfigError
from orchestrator.config import OrchestratorConfig


@pytest.mark.parametrize("name", [field.name for field in fields(OrchestratorConfig)])
def test_zero_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=f"orchestrator.{name} = 0 is out of range"):
        OrchestratorConfig(**{name: 0})


def test_endless_waiting_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"orchestrator\.avoid_s = inf"):
        OrchestratorConfig(avoid_s=float("inf"))
