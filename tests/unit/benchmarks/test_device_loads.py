"""The engine of benchmarks.cuda has the settings that a cluster without prefill groups would give it."""

from benchmarks.device.served import TOGETHER
from deploy.machine.arrangement import _CUDA_STEP_TOKENS, _TOGETHER_STEPS


def test_the_engine_steps_as_one_that_does_all_prefills() -> None:
    assert _TOGETHER_STEPS | {"max_prefill_tokens_per_step": _CUDA_STEP_TOKENS} == TOGETHER
