"""Several choices of one prompt, and the prompt's own logprobs, in the generation engine."""

import math
from dataclasses import replace

import pytest
import torch

from baton.errors import InvalidArgumentError, ResourceExhaustedError
from baton.sampling_params import SamplingParams
from baton.types import FinishReason, SampledToken
from tests.support.engines.generation import Collector, Harness, harness, prefilled, prompt, reference_ids
from tests.support.engines.slot_tables import is_empty

PARAMS = SamplingParams(max_tokens=9, temperature=0.9, seed=2**64 - 2, n=4, ignore_eos=True)
IDS = prompt(23)


def check_choices(made: Harness, collector: Collector, params: SamplingParams) -> None:
    """Choice i is what a request of its own, with seed + i, gives."""
    outputs = [collector.choice(choice).token_ids for choice in range(params.n)]
    assert outputs == [reference_ids(made.decoder, IDS, params.of_choice(choice)) for choice in range(params.n)]
    assert len({tuple(output) for output in outputs}) == params.n


def test_each_choice_is_the_output_of_its_seed_prefilled_locally() -> None:
    with harness() as made:
        collector = made.answer(IDS, PARAMS)
        check_choices(made, collector, PARAMS)
        assert made.engine.status().num_steps < 2 + 9  # one prefill of two steps for all


def test_each_choice_is_the_output_of_its_seed_pushed_once() -> None:
    with harness() as made:
        ref = made.reserve(len(IDS), len(IDS) + 9, num_choices=4).ref
        _, collector = made.submit(IDS, PARAMS, ref=ref)
        made.engine.step()
        made.push_and_commit(ref, IDS, PARAMS)
        made.run()
        check_choices(made, collector, PARAMS)


def test_choices_end_one_by_one_and_free_their_slots() -> None:
    stops = replace(PARAMS, ignore_eos=False, max_tokens=40, temperature=2.0, seed=3)
    with harness() as made:
        _, collector = made.submit(IDS, stops)
        held = []
        while not collector.ended.is_set():
            made.engine.step()
            num_ended = sum(event.finish is not None for event in collector.events)
            held.append((num_ended, made.slots.ledger().num_active))
        assert all(num_ended + num_active == 4 for num_ended, num_active in held)
        lengths = [len(collector.choice(choice).token_ids) for choice in range(4)]
        assert len(set(lengths)) > 1, "the example no longer shows different ends: take another seed"
        assert lengths == [len(reference_ids(made.decoder, IDS, stops.of_choice(choice))) for choice in range(4)]


@pytest.mark.parametrize("num_steps", [0, 1, 2, 4])
def test_cancel_ends_all_choices(num_steps: int) -> None:
    with harness() as made:
        stream_id, collector = made.submit(IDS, PARAMS)
        for _ in range(num_steps):
            made.engine.step()
        made.engine.cancel(stream_id)
        made.engine.step()
        assert [collector.choice(choice).finish for choice in range(4)] == [FinishReason.CANCELLED] * 4
        assert is_empty(made.slots.ledger())


def test_an_aborted_lease_ends_all_choices() -> None:
    with harness() as made:
        ref = made.reserve(len(IDS), len(IDS) + 9, num_choices=4).ref
        _, collector = made.submit(IDS, PARAMS, ref=ref)
        made.push_and_commit(ref, IDS, PARAMS)
        made.engine.step()
        made.slots.abort(ref)
        made.engine.step()
        assert [collector.choice(choice).finish for choice in range(4)] == [FinishReason.CANCELLED] * 4


def test_a_bad_first_token_of_one_choice_ends_the_request_once() -> None:
    with harness() as made:
        ref = made.reserve(len(IDS), len(IDS) + 9, num_choices=2).ref
        _, collector = made.submit(IDS, replace(PARAMS, n=2), ref=ref)
        made.push(ref, IDS)
        made.commit(ref, SampledToken(5000), SampledToken(1))  # a token that the model does not have
        made.engine.step()
        assert [collector.choice(choice).finish for choice in range(2)] == [FinishReason.ERROR] * 2


def test_choices_wait_for_as_many_slots_in_turn() -> None:
    with harness(num_slots=4) as made:
        _, single = made.submit(prompt(5), replace(PARAMS, n=1))
        made.engine.step()
        _, many = made.submit(IDS, PARAMS)
        made.engine.step()
        assert made.slots.ledger().num_active == 1  # three are free, four are needed
        made.run(single, many)
        check_choices(made, many, PARAMS)


def test_waiting_choices_count() -> None:
    with harness(num_slots=4, max_waiting=3) as made:
        made.submit(IDS, PARAMS)
        made.submit(IDS, replace(PARAMS, n=3))
        with pytest.raises(ResourceExhaustedError):
            made.submit(IDS, replace(PARAMS, n=1))
        made.run()


def test_impossible_choices_are_refused() -> None:
    with harness(num_slots=3) as made:
        with pytest.raises(InvalidArgumentError, match="n = 4 is out of range: this group has 3 slots"):
            made.submit(IDS, PARAMS)
        with pytest.raises(InvalidArgumentError, match="output_ids with several choices"):
            made.submit(IDS, replace(PARAMS, n=2), output_ids=(1,))


@pytest.mark.parametrize("length", [1, 2, 17, 100])
def test_prompt_logprobs_are_those_of_the_model(length: int) -> None:
    ids = prompt(length)
    params = SamplingParams(max_tokens=2, prompt_logprobs=3, n=2, repetition_penalty=1.3, logit_bias={4: 5.0})
    with harness() as made:
        collector = made.answer(ids, params)
        first, *rest = [event for event in collector.events if event.prompt]
        assert (first.index, first.choice, rest) == (0, 0, [])
        assert [token.token_id for token in first.prompt] == list(ids)
        assert (first.prompt[0].logprob, first.prompt[0].top) == (None, ())
        _, logits_TV = prefilled(made.decoder, ids)
        expected_TV = logits_TV.double().log_softmax(-1)
        for position, token in enumerate(first.prompt[1:]):
            assert token.logprob is not None
            assert math.isclose(token.logprob, float(expected_TV[position, token.token_id]), abs_tol=1e-4)
            best = torch.topk(expected_TV[position], 3).values.tolist()
            assert [each.logprob for each in token.top] == pytest.approx(best, abs=1e-4)


def test_prompt_logprobs_come_once_however_a_stream_is_resumed() -> None:
    params = SamplingParams(max_tokens=4, prompt_logprobs=0, ignore_eos=True)
    with harness() as made:
        whole = made.answer(IDS, params)
        rest = made.answer(IDS, params, output_ids=whole.token_ids[:1])
        assert not any(event.prompt for event in rest.events)
        assert rest.token_ids == whole.token_ids[1:]


def test_a_pushed_prompt_cannot_be_scored() -> None:
    with harness() as made:
        ref = made.reserve(len(IDS), len(IDS) + 4).ref
        with pytest.raises(InvalidArgumentError, match="prompt_logprobs with a lease"):
            made.submit(IDS, SamplingParams(max_tokens=4, prompt_logprobs=0), ref=ref)
        made.slots.abort(ref)
