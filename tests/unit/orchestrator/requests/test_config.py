"""Every field is checked by name."""

from dataclasses import fields
from typing import Any

import pytest

from baton.errors import ConfigError
from orchestrator.requests.config import OrchestratorConfig

MAY_BE_ZERO = ("overtaking", "trace_share")


@pytest.mark.parametrize("name", [field.name for field in fields(OrchestratorConfig) if field.name not in MAY_BE_ZERO])
def test_zero_is_refused_by_name(name: str) -> None:
    values: dict[str, Any] = {name: 0}
    with pytest.raises(ConfigError, match=rf"^{name} = 0 is wrong: "):
        OrchestratorConfig(**values)


def test_endless_waiting_is_refused() -> None:
    with pytest.raises(ConfigError, match="avoid_s = inf is wrong: input should be a finite number"):
        OrchestratorConfig(avoid_s=float("inf"))


@pytest.mark.parametrize("value", [-0.1, float("inf"), float("nan")])
def test_overtaking_is_a_part_and_may_be_none(value: float) -> None:
    assert OrchestratorConfig(overtaking=0).overtaking == 0
    with pytest.raises(ConfigError, match=f"overtaking = {value} is wrong"):
        OrchestratorConfig(overtaking=value)
