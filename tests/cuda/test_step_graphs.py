"""An engine whose decode steps run whole on the device has the tokens of the CPU: captured in CUDA graphs on a GPU,
else launched kernel by kernel in Triton's interpreter, which has a process of its own."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.engines.devices import PoisonedCuda
from tests.support.kernels.triton import late_steps, step_engines
from tests.support.kernels.triton.process import HAS_TRITON, Run

pytestmark = [pytest.mark.integration, pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")]
Check = Callable[..., None]


@pytest.fixture
def check(interpreter: Run) -> Callable[..., None]:
    """A way to run a check of `step_engines` with a GPU, or in the interpreter."""
    if os.environ["BATON_TEST_DEVICE"] == "cuda":
        return lambda function, **options: function(PoisonedCuda(), **options)
    return lambda function, **options: interpreter(_in_interpreter, function, options)


def _in_interpreter(function: Check, options: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    function(**options)


@pytest.mark.parametrize("step_graphs", [True, False])
def test_rows_join_and_leave(check: Check, step_graphs: bool) -> None:
    check(step_engines.check_joining_and_leaving, step_graphs=step_graphs)


def test_choices_share_a_prompt(check: Check) -> None:
    check(step_engines.check_choices)


def test_rows_are_preempted(check: Check) -> None:
    check(step_engines.check_preemption)


@pytest.mark.parametrize("speculation", ["off", "ngram", "streaming"])
def test_prompts_in_fragmented_pages(check: Check, speculation: str) -> None:
    check(step_engines.check_fragmented_prompts, speculation=speculation)


def test_rows_begin_with_shared_blocks(check: Check) -> None:
    check(step_engines.check_shared_prefixes)


def test_a_token_that_ends_a_sequence_is_read_late(check: Check) -> None:
    check(late_steps.check_ends)


def test_steps_are_read_before_rows_are_preempted(check: Check) -> None:
    check(late_steps.check_preemption)


@pytest.mark.parametrize("late", [True, False])
def test_an_error_of_the_drawing_ends_the_streams_of_its_step(check: Check, late: bool) -> None:
    check(late_steps.check_failures, late=late)


def test_logits_are_changed_late(check: Check) -> None:
    check(late_steps.check_grammars)


def test_logprobs_are_read_late(check: Check) -> None:
    check(late_steps.check_logprobs)


def test_a_round_of_drafts_is_launched_before_it_is_read(check: Check) -> None:
    check(late_steps.check_drafts)


def test_drafts_are_read_before_the_host_needs_them(check: Check) -> None:
    check(late_steps.check_drafts_of_others)


@pytest.mark.parametrize(
    ("seed", "num_requests", "speculation"),
    [
        (1, 6, "off"),
        *(pytest.param(seed, 12, "off", marks=pytest.mark.nightly) for seed in range(2, 10)),
        *(pytest.param(seed, 12, "streaming", marks=pytest.mark.nightly) for seed in range(2, 10)),
    ],
)
def test_pipelined_steps_get_the_tokens_of_serial_ones(
    check: Check, seed: int, num_requests: int, speculation: str
) -> None:
    check(late_steps.check_walk, seed=seed, num_requests=num_requests, speculation=speculation)


@pytest.mark.skipif(os.environ["BATON_TEST_DEVICE"] == "cuda", reason="takes no kernel")
def test_which_engines_run_whole_steps() -> None:
    step_engines.check_made()
