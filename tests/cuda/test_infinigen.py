"""Residency `infinigen` on a GPU: picks, logits and tokens of the emulated device's, by tensors and Triton's kernels.
Without a GPU a device that stands for one runs them, in Triton's interpreter."""

import pytest

from tests.cuda.conftest import ON_GPU
from tests.support.engines import fetching
from tests.support.kernels.triton.process import HAS_TRITON, Run

pytestmark = pytest.mark.integration

needs_interpreter = pytest.mark.skipif(ON_GPU or not HAS_TRITON, reason="is for machines without a GPU, with Triton")


@pytest.mark.gpu
@pytest.mark.parametrize("num_areas", [2, 3])
def test_steps_are_those_of_the_emulated_device(num_areas: int) -> None:
    fetching.check_steps(fetching.gpu(), num_areas, 20)


@pytest.mark.gpu
def test_answers_are_those_of_the_emulated_device() -> None:
    fetching.check_answers(fetching.gpu())


@needs_interpreter
@pytest.mark.parametrize(
    ("link", "num_areas"),
    [
        pytest.param("launched", None, id="engine"),
        pytest.param("threads", None, id="engine-threads", marks=pytest.mark.ci),
        pytest.param("launched", 3, id="areas", marks=pytest.mark.ci),
        pytest.param("slow", 2, id="double-buffer-late", marks=pytest.mark.ci),
    ],
)
def test_a_device_that_stands_for_a_gpu_has_them(interpreter: Run, link: str, num_areas: int | None) -> None:
    interpreter(fetching.check_standing, link, num_areas)
