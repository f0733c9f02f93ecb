"""Memory that runs out: the youngest rows give way and come back, the oldest goes on, and in fp32, as here, no token
changes."""

import dataclasses
import math
from collections.abc import Callable

import pytest

from baton.errors import InvalidArgumentError, ResourceExhaustedError
from baton.sampling_params import SamplingParams
from baton.types import FinishReason, KvLayout, LeaseRef, TokenEvent
from generate_workers.engine.rows import Row
from generate_workers.slots.kv_memory import MemoryLimits
from tests.support.engines.generation import Collector, Harness, eos_decoder, harness, prompt, reference_ids
from tests.support.engines.slot_tables import page_bytes

LONG = SamplingParams(max_tokens=60, ignore_eos=True)
DECODER = eos_decoder()
LAYOUT = DECODER.layout


def limit(num_tokens: int, num_rows: int, layout: KvLayout = LAYOUT) -> MemoryLimits:
    """Room for rows of that many tokens."""
    return MemoryLimits(num_rows * page_bytes(num_tokens, layout))


def check_tokens(made: Harness, *asked: tuple[Collector, int, SamplingParams]) -> None:
    for collector, length, params in asked:
        assert collector.token_ids == reference_ids(made.decoder, prompt(length), params)
        assert collector.finish is FinishReason.LENGTH


def test_rows_that_outgrow_memory_pause_and_go_on_with_the_same_tokens() -> None:
    with harness(decoder=DECODER, limits=limit(96, 2), growth_tokens=1) as made:
        asked = [(made.submit(prompt(length), LONG)[1], length, LONG) for length in (30, 31, 32, 33)]
        made.run()
        check_tokens(made, *asked)
        status = made.engine.status()
        assert status.num_preemptions > 0
        assert (status.num_preempted, status.ledger.kv.num_bytes_taken) == (0, 0)


def test_the_oldest_row_is_never_preempted() -> None:
    with harness(decoder=DECODER, limits=limit(96, 2), growth_tokens=1) as made:
        streams = [made.submit(prompt(length), LONG)[1] for length in (30, 31, 32, 33)]
        num_steps = 0
        while not streams[0].ended.is_set():
            made.engine.step()
            num_steps += 1
        num_prefill_steps = math.ceil((30 + 31 + 32 + 33) / 16)
        assert num_steps <= num_prefill_steps + 60  # not a single step without a token of it, once it decodes
        made.run()


def test_memory_in_use_never_exceeds_its_limit() -> None:
    limits = limit(96, 2)
    with harness(decoder=DECODER, limits=limits, growth_tokens=1) as made:
        streams = [made.submit(prompt(length), LONG)[1] for length in (30, 31, 32, 33)]
        while not all(stream.ended.is_set() for stream in streams):
            made.engine.step()
            ledger = made.slots.ledger()
            assert ledger.num_bytes_held <= ledger.kv.num_bytes_taken <= limits.kv_bytes
            assert not ledger.imbalance


def test_a_preempted_row_comes_back_before_a_newcomer() -> None:
    with harness(decoder=DECODER, limits=limit(96, 1), growth_tokens=1, num_slots=3) as made:
        order: list[str] = []
        for number, name in enumerate("abcd"):
            made.submit(prompt(30 + number), LONG, on_end=lambda name=name: order.append(name))  # type: ignore[misc]
        made.run()
        assert order == list("abcd")


def test_a_pushed_row_that_was_preempted_is_prefilled_here() -> None:
    with harness(decoder=DECODER, limits=limit(96, 2), growth_tokens=1) as made:
        elder = made.submit(prompt(40), LONG)[1]
        made.engine.step()
        ref = made.reserve(30, 90).ref
        first = made.push_and_commit(ref, prompt(30), LONG)
        pushed = made.submit(prompt(30), LONG, ref=ref)[1]
        made.engine.step()
        assert pushed.token_ids[0] == first.token_id
        others = [made.submit(prompt(30 + number), LONG)[1] for number in (1, 2)]
        made.run()
        assert made.engine.status().num_preemptions > 0
        check_tokens(made, (elder, 40, LONG), (pushed, 30, LONG), *((o, 31 + n, LONG) for n, o in enumerate(others)))


def test_choices_that_wait_for_their_prompt_are_preempted_with_it() -> None:
    params = dataclasses.replace(LONG, n=2, temperature=1.0, seed=5)
    with harness(decoder=DECODER, num_slots=6) as made:
        expected = made.answer(prompt(50), params)
    with harness(decoder=DECODER, limits=limit(96, 3), growth_tokens=1, num_slots=6) as made:
        elders = [(made.submit(prompt(length), LONG)[1], length, LONG) for length in (30, 31)]
        choices = made.submit(prompt(50), params)[1]
        made.run()
        assert made.engine.status().num_preemptions > 0
        check_tokens(made, *elders)
        for number in (0, 1):
            assert choices.choice(number).token_ids == expected.choice(number).token_ids


def test_a_cancelled_row_that_waits_to_come_back_ends_at_once() -> None:
    with harness(decoder=DECODER, limits=limit(96, 1), growth_tokens=1) as made:
        elder = made.submit(prompt(30), LONG)[1]
        stream_id, young = made.submit(prompt(31), LONG)
        while not made.engine.status().num_preempted:
            made.engine.step()
        made.engine.cancel(stream_id)
        made.engine.step()
        assert young.finish is FinishReason.CANCELLED
        assert made.engine.status().num_preempted == 0
        made.run(elder)


def test_prompt_scores_are_given_once_though_the_prompt_was_prefilled_twice() -> None:
    params = dataclasses.replace(LONG, prompt_logprobs=2)
    with harness(decoder=DECODER) as made:
        expected = made.answer(prompt(60), params).events[0].prompt
    with harness(decoder=DECODER, limits=limit(128, 1), growth_tokens=1, max_batched_tokens=8) as made:
        made.submit(prompt(62), dataclasses.replace(LONG, max_tokens=30))
        scored = made.submit(prompt(60), params)[1]
        made.run()
        assert made.engine.status().num_preemptions > 0
        assert [each.token_id for each in scored.events[0].prompt] == [each.token_id for each in expected]
        logprobs = [each.logprob for each in scored.events[0].prompt[1:]]
        assert logprobs == pytest.approx([each.logprob for each in expected[1:]], abs=1e-4)


# Who is let in.


def test_a_request_that_could_not_run_alone_is_refused_at_once() -> None:
    with harness(decoder=DECODER, limits=limit(64, 1)) as made:
        with pytest.raises(InvalidArgumentError, match=r"kv_memory_bytes = \d+: shorten the request, or raise"):
            made.submit(prompt(10), LONG)
        with pytest.raises(InvalidArgumentError, match="70 tokens, prompt and max_tokens, take .* kv_memory_bytes"):
            made.reserve(10, 70)
        made.answer(prompt(4), LONG)


def test_choices_whose_prompts_do_not_fit_together_are_refused_at_once() -> None:
    params = dataclasses.replace(LONG, max_tokens=10, n=4)
    with (
        harness(decoder=DECODER, limits=limit(64, 3), growth_tokens=1) as made,
        pytest.raises(InvalidArgumentError, match="n = 4 choices of 50 tokens take"),
    ):
        made.submit(prompt(50), params)


def test_a_lease_counts_before_a_byte_is_pushed() -> None:
    with harness(decoder=DECODER, limits=limit(64, 2), growth_tokens=64) as made:
        refs = [made.reserve(10, 64).ref for _ in range(2)]
        assert made.slots.ledger().num_bytes_held == 0
        with pytest.raises(ResourceExhaustedError, match="do not fit in addition to"):
            made.reserve(10, 64)
        for ref in refs:
            made.slots.abort(ref)


def test_rows_are_let_in_by_what_they_will_likely_need_not_by_what_they_may() -> None:
    with harness(decoder=DECODER, limits=limit(128, 2), growth_tokens=4) as made:
        streams = [made.submit(prompt(10), dataclasses.replace(LONG, max_tokens=100))[1] for _ in range(4)]
        made.engine.step()
        assert made.engine.status().num_rows == 4
        made.run(*streams)


def test_no_lease_takes_what_a_preempted_row_waits_for() -> None:
    with harness(decoder=DECODER, limits=limit(96, 1), growth_tokens=1) as made:
        made.submit(prompt(30), LONG)
        made.submit(prompt(31), LONG)
        while not made.engine.status().num_preempted:
            made.engine.step()
        free = made.slots.memory.limits.kv_bytes - made.slots.ledger().kv.num_bytes_taken
        assert made.slots.memory.need(1, 2).home <= free  # there would be room
        with pytest.raises(ResourceExhaustedError):
            made.reserve(1, 2)
        made.run()


def test_the_oldest_waits_for_memory_that_leases_hold_and_goes_on_when_they_end() -> None:
    with harness(decoder=DECODER, limits=limit(96, 1), growth_tokens=1) as made:
        elder = made.submit(prompt(30), LONG)[1]
        made.engine.step()
        ref = made.reserve(32, 90).ref
        for _ in range(100):
            made.engine.step()
        num_tokens = len(elder.token_ids)
        assert not elder.ended.is_set()
        made.engine.step()
        assert len(elder.token_ids) == num_tokens
        assert made.engine._running.is_stalled  # so that the engine's thread sleeps until a lease changes
        made.slots.abort(ref)
        made.run(elder)
        check_tokens(made, (elder, 30, LONG))


def until_preempted(made: Harness) -> None:
    while not made.engine.status().num_preempted:
        made.engine.step()


def test_leases_cannot_starve_an_oldest_row_that_waits_for_memory() -> None:
    with harness(decoder=DECODER, limits=limit(96, 1), growth_tokens=1) as made:
        elder = made.submit(prompt(30), LONG)[1]
        made.engine.step()
        ref = made.reserve(32, 90).ref
        while not made.engine._running.is_stalled:
            made.engine.step()
        made.slots.abort(ref)
        with pytest.raises(ResourceExhaustedError, match="rows wait for that gave way or must grow set aside: try"):
            made.reserve(32, 90)
        made.engine.step()
        assert not made.engine._running.is_stalled
        made.run(elder)
        made.slots.abort(made.reserve(32, 90).ref)  # nothing is owed any more


def test_what_a_preempted_row_gives_back_is_no_lease_s_even_for_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    with harness(decoder=DECODER, limits=limit(96, 1), growth_tokens=1) as made:
        refused: list[str] = []
        wake = made.slots.changes.wake

        def reserve_at_once() -> None:
            wake()
            if made.engine.status().num_preemptions > len(refused):
                with pytest.raises(ResourceExhaustedError) as refusal:
                    made.reserve(1, 2)
                refused.append(str(refusal.value))

        asked = [(made.submit(prompt(length), LONG)[1], length, LONG) for length in (30, 31)]
        monkeypatch.setattr(made.slots.changes, "wake", reserve_at_once)
        until_preempted(made)
        monkeypatch.undo()
        assert refused
        made.run()
        check_tokens(made, *asked)


def pushed(made: Harness, params: SamplingParams = LONG) -> tuple[LeaseRef, Collector]:
    ref = made.reserve(31, 91, num_choices=params.n).ref
    made.push_and_commit(ref, prompt(31), params)
    return ref, made.submit(prompt(31), params, ref=ref)[1]


def test_aborting_the_lease_of_a_preempted_row_cancels_it() -> None:
    with harness(decoder=DECODER, limits=limit(96, 1), growth_tokens=1) as made:
        elder = made.submit(prompt(30), LONG)[1]
        made.engine.step()
        ref, young = pushed(made)
        until_preempted(made)
        made.slots.abort(ref)
        made.engine.step()
        assert young.finish is FinishReason.CANCELLED
        made.run(elder)


def test_aborting_a_lease_just_before_its_row_is_preempted_cancels_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with harness(decoder=DECODER, limits=limit(96, 1), growth_tokens=1) as made:
        elder = made.submit(prompt(30), LONG)[1]
        made.engine.step()
        ref, young = pushed(made)
        preempt = made.engine._running._preempt

        def abort_and_preempt(leader: Row) -> None:
            made.slots.abort(ref)
            preempt(leader)

        monkeypatch.setattr(made.engine._running, "_preempt", abort_and_preempt)
        until_preempted(made)
        made.engine.step()
        assert young.finish is FinishReason.CANCELLED
        made.run(elder)


def test_aborting_a_lease_whose_first_choice_has_ended_cancels_the_others() -> None:
    params = dataclasses.replace(LONG, n=3, temperature=1.5, seed=1, ignore_eos=False)
    with harness(decoder=DECODER) as made:
        ref, choices = pushed(made, params)
        made.engine.step()
        leader = next(row for row in made.engine._running.rows.values() if row.choice == 0)
        leader.stream.rows.remove(leader)
        made.engine._running.retire(leader)
        choices(TokenEvent(0, None, "", 1, FinishReason.STOP))
        made.slots.abort(ref)
        made.engine.step()
        assert [choices.choice(number).finish for number in (1, 2)] == [FinishReason.CANCELLED] * 2


# A device that has less memory than it was said to have.


@pytest.fixture
def scarce(monkeypatch: pytest.MonkeyPatch) -> Callable[[Harness], None]:
    def make(made: Harness) -> None:
        def fail(*_: object) -> None:
            raise RuntimeError("out of memory")

        monkeypatch.setattr(made.slots.memory.residency, "open", fail)

    return make


def test_a_row_that_cannot_come_back_waits_while_others_run(scarce: Callable[[Harness], None]) -> None:
    with harness(decoder=DECODER, limits=limit(96, 1), growth_tokens=1) as made:
        elder = made.submit(prompt(30), LONG)[1]
        stream_id, young = made.submit(prompt(31), LONG)
        until_preempted(made)
        made.slots.memory.limits = limit(96, 4)
        scarce(made)
        for _ in range(3):
            made.engine.step()
        assert (young.finish, made.engine.status().num_preempted) == (None, 1)
        made.engine.cancel(stream_id)
        made.run(elder)
        check_tokens(made, (elder, 30, LONG))


def test_rows_that_cannot_come_back_although_nothing_runs_end_alone(scarce: Callable[[Harness], None]) -> None:
    with harness(decoder=DECODER, limits=limit(96, 1), growth_tokens=1) as made:
        elder = made.submit(prompt(30), LONG)[1]
        young = made.submit(prompt(31), LONG)[1]
        until_preempted(made)
        scarce(made)
        made.run(elder, young)
        assert elder.finish is FinishReason.LENGTH
        assert young.error.startswith("ResourceExhaustedError: no memory for 1 slots")


def test_choices_that_cannot_copy_a_pushed_prompt_end_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    with harness(decoder=DECODER) as made:
        other = made.submit(prompt(30), LONG)[1]
        choices = pushed(made, dataclasses.replace(LONG, n=2))[1]
        monkeypatch.setattr(made.slots.memory.residency, "copy", fail)
        made.run()
        assert choices.error == "RuntimeError: out of memory"
        check_tokens(made, (other, 30, LONG))
