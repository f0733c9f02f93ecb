"""The costs of steps start with the rates of the engine's device."""

from dataclasses import replace

import pytest

from baton.planning.device_profile import nominal_core
from generate_workers.engine.served_model import step_cost
from tests.support.models.tiny_models import random_decoder


def test_costs_of_steps_follow_from_the_profile_of_the_device() -> None:
    decoder, core = random_decoder(), nominal_core(4)
    assert step_cost(decoder, core).plain == step_cost(decoder, None).plain
    fast = replace(core.hardware, memory_bandwidth=10 * core.hardware.memory_bandwidth)
    assert step_cost(decoder, None).plain.step_s == pytest.approx(
        10 * step_cost(decoder, replace(core, hardware=fast)).plain.step_s
    )
