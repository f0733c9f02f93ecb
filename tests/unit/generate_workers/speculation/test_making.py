"""Drafts are planned at first by the rates of the engine's device."""

from dataclasses import replace

import pytest

from baton.planning.device_profile import nominal_core
from generate_workers.speculation.making import nominal_cost
from tests.support.models.tiny_models import random_decoder


def test_costs_of_steps_follow_from_the_profile_of_the_device() -> None:
    decoder, core = random_decoder(), nominal_core(4)
    assert nominal_cost(decoder, core) == nominal_cost(decoder, None)
    fast = replace(core.hardware, memory_bandwidth=10 * core.hardware.memory_bandwidth)
    assert nominal_cost(decoder, None).step_s == pytest.approx(
        10 * nominal_cost(decoder, replace(core, hardware=fast)).step_s
    )
