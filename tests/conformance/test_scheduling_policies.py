"""What every SchedulingPolicy must do: plans that can run, that reach every row's last token, and that change no token.

An implementation joins with a factory in BATCHERS.
"""

import dataclasses
from collections.abc import Callable

import pytest

from baton.sampling_params import SamplingParams
from baton.types import SlotId
from generate_workers.engine.chunked_prefill import ChunkedPrefillPolicy
from generate_workers.engine.scheduling_policy import SchedulingPolicy
from generate_workers.engine.step_bound import PrefillWork
from generate_workers.slots.kv_memory import MemoryLimits
from tests.support.engines.batches import Batch, OneByOne, bounded, by_tokens
from tests.support.engines.generation import eos_decoder, harness, prompt, reference_ids
from tests.support.engines.slot_tables import page_bytes

BATCHERS: dict[str, Callable[[], SchedulingPolicy]] = {
    "decode-first": lambda: by_tokens(8),
    "decode-first-bounded": lambda: ChunkedPrefillPolicy(64, bounded(1.5), PrefillWork(1e-3)),
    "one-by-one": OneByOne,
}
DECODER = eos_decoder()
PARAMS = SamplingParams(max_tokens=24, temperature=0.8, seed=3, ignore_eos=True)


@pytest.fixture(params=BATCHERS)
def scheduling_policy(request: pytest.FixtureRequest) -> SchedulingPolicy:
    return BATCHERS[request.param]()


def test_without_rows_there_is_nothing_to_run(scheduling_policy: SchedulingPolicy) -> None:
    assert not scheduling_policy.plan({})


def test_a_row_without_a_token_to_run_is_in_no_plan(scheduling_policy: SchedulingPolicy) -> None:
    batch = Batch(scheduling_policy)
    batch.join(SlotId(0), num_cached=5, num_known=5)
    assert not batch.plan()


def test_planning_changes_nothing(scheduling_policy: SchedulingPolicy) -> None:
    batch = Batch(scheduling_policy)
    batch.join(SlotId(0), num_cached=0, num_known=30)
    batch.join(SlotId(1), num_cached=5, num_known=6)
    assert batch.plan() == batch.plan()


def test_every_row_samples_in_time_and_the_counts_are_those_of_the_spans(scheduling_policy: SchedulingPolicy) -> None:
    batch, sampled = Batch(scheduling_policy), set[SlotId]()
    for number, num_known in enumerate((40, 1, 7, 25)):
        batch.join(SlotId(number), num_cached=0, num_known=num_known)
    for _ in range(100):
        lengths = {slot: row.num_known - row.num_cached for slot, row in batch.rows.items()}
        plan = batch.run(lambda plan: 1e-3 * (1 + plan.num_prefill_tokens))
        decoding = [span for span in plan.spans if lengths[span.slot] == 1]
        assert plan.decoding.num_rows == len(decoding) <= len(plan.spans)
        assert plan.num_prefill_tokens == sum(len(span.tokens) for span in plan.spans) - len(decoding)
        assert plan
        sampled |= {span.slot for span in plan.spans if span.samples}
    assert sampled == set(batch.rows)


@pytest.mark.parametrize("num_choices", [1, 2])
def test_an_engine_makes_the_same_tokens(scheduling_policy: SchedulingPolicy, num_choices: int) -> None:
    params = dataclasses.replace(PARAMS, n=num_choices)
    with harness(decoder=DECODER, scheduling_policy=scheduling_policy) as made:
        streams = {length: made.submit(prompt(length), params)[1] for length in (5, 40)}
        made.run()
        for length, stream in streams.items():
            for choice in range(num_choices):
                expected = reference_ids(DECODER, prompt(length), params.of_choice(choice))
                assert stream.choice(choice).token_ids == expected


def test_an_engine_that_runs_out_of_memory_makes_the_same_tokens(scheduling_policy: SchedulingPolicy) -> None:
    limits = MemoryLimits(page_bytes(96, DECODER.layout))
    params = dataclasses.replace(PARAMS, max_tokens=60)
    with harness(decoder=DECODER, scheduling_policy=scheduling_policy, limits=limits, growth_tokens=1) as made:
        streams = {length: made.submit(prompt(length), params)[1] for length in (30, 31)}
        made.run()
        assert made.engine.status().num_preemptions
        for length, stream in streams.items():
            assert stream.token_ids == reference_ids(DECODER, prompt(length), params)
