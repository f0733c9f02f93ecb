"""Steps over KV in pages choose the tokens of the CPU: in Triton's interpreter where there is no GPU."""

from pathlib import Path

import pytest

from tests.support.kernels.triton import steps
from tests.support.kernels.triton.process import HAS_TRITON, Run
from tests.support.models.tiny_models import build_tiny

pytestmark = [pytest.mark.integration, pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")]


@pytest.mark.parametrize("window", [None, pytest.param(9, marks=pytest.mark.ci)])
def test_rows_of_a_step_get_the_tokens_of_the_cpu(interpreter: Run, window: int | None) -> None:
    interpreter(check_on_cpu, window)


def check_on_cpu(window: int | None) -> None:
    steps.check_steps(window=window)


@pytest.mark.parametrize("name", ["gemma3", pytest.param("qwen3_moe", marks=pytest.mark.ci)])
def test_layers_of_another_kind_get_the_tokens_of_the_cpu(interpreter: Run, name: str, tmp_path: Path) -> None:
    """Layers that turn in two ways and see windows or everything; and experts."""
    build_tiny(name, tmp_path)
    interpreter(steps.check_family_steps, tmp_path)
