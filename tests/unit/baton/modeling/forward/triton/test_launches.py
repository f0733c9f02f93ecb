"""The kernels of all steps are compiled before the first request, and a layer needs few of them."""

from typing import Any

import pytest

from tests.support.kernels.triton import compiled_sets
from tests.support.kernels.triton.process import HAS_TRITON, Run

pytestmark = [pytest.mark.integration, pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")]


@pytest.mark.parametrize("window", [None, 4096])
def test_steps_of_all_shapes_use_compiled_kernels(interpreter: Run, window: int | None) -> None:
    interpreter(compiled_sets.check_shapes, window)


@pytest.mark.parametrize(
    ("window", "options"),
    [
        pytest.param(None, {"speculation": "ngram"}, id="ngram"),
        pytest.param(None, {"speculation": "streaming", "step_graphs": False}, id="streaming", marks=pytest.mark.ci),
        pytest.param(40, {}, id="window", marks=pytest.mark.ci),
        pytest.param(40, {"policy": "host"}, id="host-window", marks=pytest.mark.ci),
    ],
)
def test_an_engine_uses_compiled_kernels(interpreter: Run, window: int | None, options: dict[str, Any]) -> None:
    interpreter(compiled_sets.check_engine, window, options)


@pytest.mark.ci
def test_an_engine_that_selects_keys_uses_compiled_kernels(interpreter: Run) -> None:
    interpreter(compiled_sets.check_infinigen)


def test_the_host_reads_nothing_inside_a_step(interpreter: Run) -> None:
    interpreter(compiled_sets.check_traceable)


def test_a_layer_has_few_launches(interpreter: Run) -> None:
    interpreter(compiled_sets.check_budgets)
