"""The engine keeps its own bound: on a clock that moves as much as a step's work says, rows that decode are not kept
waiting by a prompt beyond it, and tokens stay exact.
"""

from collections.abc import Sequence

import pytest

from baton.modeling.forward.decoder import SequenceSpan
from baton.sampling_params import SamplingParams
from tests.support.engines.generation import WatchedDecoder, eos_decoder, harness, prompt, reference_ids
from tests.support.manual_clock import ManualClock

STREAM = SamplingParams(max_tokens=90, ignore_eos=True)
SHORT = SamplingParams(max_tokens=4, ignore_eos=True)


@pytest.mark.parametrize(("budget_s", "most_s"), [(0.0, 0.027), (float("inf"), 0.075)])
def test_a_prompt_delays_running_rows_by_its_bound(budget_s: float, most_s: float) -> None:
    clock = ManualClock(start_s=100.0)

    def take_time(token_ids: Sequence[int], spans: Sequence[SequenceSpan]) -> None:
        """Some time for each forward, row that decodes, and token of prefill."""
        num_decoded = sum(len(span.tokens) == 1 for span in spans)
        clock.advance(0.010 + 0.001 * num_decoded + 0.001 * (len(token_ids) - num_decoded))

    decoder = WatchedDecoder(eos_decoder(), take_time)
    with harness(
        decoder=decoder, clock=clock, max_slot_tokens=400, max_batched_tokens=64, step_budget_s=budget_s
    ) as made:
        _, stream = made.submit(prompt(20), STREAM)
        for _ in range(8):
            made.engine.step()
        _, late = made.submit(prompt(300), SHORT)
        steps_s = []
        while not late.ended.is_set():
            before_s = clock.now_s()
            made.engine.step()
            steps_s.append(clock.now_s() - before_s)
        made.run(stream)
    assert max(steps_s) <= most_s + 1e-6
    assert max(steps_s) > 0.6 * most_s  # what may be used is used
    assert stream.token_ids == reference_ids(decoder, prompt(20), STREAM)
    assert late.token_ids == reference_ids(decoder, prompt(300), SHORT)
