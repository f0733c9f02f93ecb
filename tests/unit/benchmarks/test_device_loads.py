"""The engine of benchmarks.cuda has the settings that a cluster without prefill groups would give it, and its steps are
counted."""

import pytest

from benchmarks.device.kernels import Rates
from benchmarks.device.loads import _load_times
from benchmarks.device.model import TINY
from benchmarks.device.served import TOGETHER, Load, Served, Step
from deploy.machine.arrangement import _CUDA_STEP_TOKENS, _TOGETHER_STEPS


def test_the_engine_steps_as_one_that_does_all_prefills() -> None:
    assert _TOGETHER_STEPS | {"max_batched_tokens": _CUDA_STEP_TOKENS} == TOGETHER


@pytest.mark.parametrize(("most_rows", "shown_ms"), [(4, 30.0), (3, 20.0)])
def test_whole_steps_are_counted_where_some_users_wait_for_their_prompts(most_rows: int, shown_ms: float) -> None:
    served = Served(Load(users=4, prompt_tokens=8, output_tokens=2, rounds=1))
    served.steps = [whole(1, 0.01), whole(2, 0.02), whole(most_rows, 0.03), Step(0.0, 0.1, 2, 8, 0, 1, 0.0, 0.0, 0.0)]
    times = [each for each in _load_times({}, served, TINY, Rates(1.0, 1.0)) if each.metric == "step_ms"]
    found = {str(each.case["steps"]): (each.case["share"], round(each.ms, 6)) for each in times}
    assert found == {"whole": (0.75, shown_ms), "launched": (0.25, 100.0)}


def whole(num_rows: int, took_s: float) -> Step:
    return Step(0.0, took_s, num_rows, 0, 0, 1, took_s, 0.0, 0.0)
