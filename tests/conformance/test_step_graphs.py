"""Steps over KV in pages choose the tokens of the CPU: in Triton's interpreter where there is no GPU."""

from pathlib import Path

import pytest

from baton.modeling.forward.step_graphs import step_shapes
from tests.support.kernels.triton import steps
from tests.support.kernels.triton.process import HAS_TRITON, Run
from tests.support.models.tiny_models import build_tiny, random_decoder

pytestmark = [pytest.mark.integration, pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")]


@pytest.mark.parametrize("window", [None, pytest.param(9, marks=pytest.mark.ci)])
def test_rows_of_a_step_get_the_tokens_of_the_cpu(interpreter: Run, window: int | None) -> None:
    interpreter(check_on_cpu, window)


def check_on_cpu(window: int | None) -> None:
    steps.check_steps(window=window)


def test_steps_of_all_shapes_have_the_logits_of_the_cpu(interpreter: Run) -> None:
    interpreter(check_shapes_on_cpu)


def check_shapes_on_cpu() -> None:
    steps.check_shapes()


def test_pages_whose_keys_are_left_out_are_not_read(interpreter: Run) -> None:
    interpreter(check_left_out_on_cpu)


def check_left_out_on_cpu() -> None:
    steps.check_left_out_pages()


@pytest.mark.parametrize(("num_slots", "max_prefill_tokens"), [(1, 16), (16, 256), (48, 2048), (256, 2048)])
def test_few_shapes_are_captured(num_slots: int, max_prefill_tokens: int) -> None:
    shapes = step_shapes(random_decoder(), num_slots, max_prefill_tokens, drafts=True)
    assert len(set(shapes)) == len(shapes) <= 64
    assert [shape.num_rows for shape in shapes if shape.most_queries == 1][-1] == num_slots
    assert max(shape.num_tokens for shape in shapes if not shape.num_spans) <= max(256, num_slots)


@pytest.mark.parametrize("name", ["gemma3", pytest.param("qwen3_moe", marks=pytest.mark.ci)])
def test_layers_of_another_kind_get_the_tokens_of_the_cpu(interpreter: Run, name: str, tmp_path: Path) -> None:
    """Layers that turn in two ways and see windows or everything; and experts."""
    build_tiny(name, tmp_path)
    interpreter(steps.check_family_steps, tmp_path)
