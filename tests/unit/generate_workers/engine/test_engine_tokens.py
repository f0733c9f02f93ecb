"""Whatever shares a batch, however KV came about: a request's tokens are those of whole forwards, one by one.

All slots are poisoned: a row that read one KV entry nobody wrote would not produce these tokens.
"""

import dataclasses

import pytest

from baton.sampling_params import SamplingParams
from baton.types import FinishReason, SampledToken
from tests.support.engines.generation import Collector, Harness, harness, prompt, reference_ids
from tests.support.models.tiny_models import random_decoder
from tests.support.models.tiny_tokenizer import text_of

GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=12, temperature=0.9, top_p=0.95, seed=77, ignore_eos=True)
PENALISED = dataclasses.replace(SAMPLED, repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=0.2)
ALL_PARAMS = pytest.mark.parametrize("params", [GREEDY, SAMPLED, PENALISED], ids=["greedy", "sampled", "penalised"])


@ALL_PARAMS
def test_a_row_alone_equals_whole_forwards(params: SamplingParams) -> None:
    with harness() as made:
        answer = made.answer(prompt(9), params)
        assert answer.token_ids == reference_ids(made.decoder, prompt(9), params)
        assert answer.text == text_of(answer.token_ids)


@ALL_PARAMS
def test_ragged_rows_of_one_batch_equal_each_alone(params: SamplingParams) -> None:
    prompts = [prompt(length) for length in (1, 2, 17, 40, 5, 63)]
    with harness(num_slots=6) as made:
        streams = [made.submit(ids, params)[1] for ids in prompts]
        made.run()
        for ids, stream in zip(prompts, streams, strict=True):
            assert stream.token_ids == reference_ids(made.decoder, ids, params)


@pytest.mark.parametrize("budget", [1, 3, 7, 64])
def test_prefill_in_chunks_equals_whole_prefill(budget: int) -> None:
    with harness(max_batched_tokens=budget) as made:
        assert made.answer(prompt(37), SAMPLED).token_ids == reference_ids(made.decoder, prompt(37), SAMPLED)


def test_rows_that_join_and_leave_disturb_no_other() -> None:
    long = dataclasses.replace(SAMPLED, max_tokens=40)
    with harness(num_slots=3) as made:
        _, steady = made.submit(prompt(11), long)
        others = []
        for turn in range(8):
            made.engine.step()
            made.engine.step()
            others.append(
                made.submit(prompt(5 + 6 * turn, seed=turn), dataclasses.replace(SAMPLED, max_tokens=1 + turn))
            )
            if turn % 3 == 2:
                made.engine.cancel(others[-1][0])
        made.run()
        assert steady.token_ids == reference_ids(made.decoder, prompt(11), long)
        for turn, (_, stream) in enumerate(others):
            if stream.finish is not FinishReason.CANCELLED:
                params = dataclasses.replace(SAMPLED, max_tokens=1 + turn)
                assert stream.token_ids == reference_ids(made.decoder, prompt(5 + 6 * turn, seed=turn), params)


def test_a_seeded_request_is_the_same_alone_and_among_sixteen() -> None:
    hot = dataclasses.replace(SAMPLED, temperature=1.5, top_p=1.0)
    with harness(num_slots=16, max_waiting=16) as made:
        alone = made.answer(prompt(20), hot).token_ids
        crowd = [made.submit(prompt(8 + n, seed=n), dataclasses.replace(hot, seed=n))[1] for n in range(7)]
        _, among = made.submit(prompt(20), hot)
        crowd += [made.submit(prompt(30 + n, seed=n), dataclasses.replace(hot, seed=n))[1] for n in range(8)]
        made.run()
        assert among.token_ids == alone
        assert len({tuple(stream.token_ids) for stream in crowd}) == 15


@ALL_PARAMS
@pytest.mark.parametrize("num_tokens", [1, 2, 33])
def test_pushed_kv_continues_like_local_prefill(params: SamplingParams, num_tokens: int) -> None:
    ids = prompt(num_tokens)
    with harness() as made:
        stream = pushed(made, ids, params)
        assert stream.token_ids == reference_ids(made.decoder, ids, params)


def test_pushed_and_local_rows_share_a_batch() -> None:
    with harness() as made:
        _, local = made.submit(prompt(50), SAMPLED)
        made.engine.step()
        lease = made.reserve(13, 30)
        _, stream = made.submit(prompt(13), GREEDY, ref=lease.ref)
        made.engine.step()
        made.push_and_commit(lease.ref, prompt(13), GREEDY)
        made.run()
        assert local.token_ids == reference_ids(made.decoder, prompt(50), SAMPLED)
        assert stream.token_ids == reference_ids(made.decoder, prompt(13), GREEDY)


@pytest.mark.parametrize("generate_first", [True, False])
def test_a_row_joins_whether_stream_or_commit_comes_first(generate_first: bool) -> None:
    ids = prompt(10)
    with harness() as made:
        ref = made.reserve(10, 30).ref
        if not generate_first:
            made.push_and_commit(ref, ids, GREEDY)
        _, stream = made.submit(ids, GREEDY, ref=ref)
        made.engine.step()
        if generate_first:
            assert stream.events == []
            made.push_and_commit(ref, ids, GREEDY)
        made.run()
        assert stream.token_ids == reference_ids(made.decoder, ids, GREEDY)


@ALL_PARAMS
@pytest.mark.parametrize("num_done", [1, 5, 11])
def test_a_resumed_stream_goes_on_exactly(params: SamplingParams, num_done: int) -> None:
    ids = prompt(14)
    with harness() as made:
        whole = made.answer(ids, params)
        rest = made.answer(ids, params, output_ids=whole.token_ids[:num_done])
        assert rest.token_ids == whole.token_ids[num_done:]
        assert rest.events[0].index == num_done
        assert "".join(event.text for event in whole.events[:num_done]) + rest.text == whole.text


def test_a_resumed_stream_goes_on_from_pushed_kv() -> None:
    ids = prompt(14)
    with harness() as made:
        done = made.answer(ids, PENALISED).token_ids[:4]
        ref = made.reserve(18, 30).ref
        made.push(ref, [*ids, *done])
        _, stream = made.submit(ids, PENALISED, output_ids=done, ref=ref)
        expected = reference_ids(made.decoder, ids, PENALISED)[4:]
        made.commit(ref, SampledToken(expected[0]))
        made.run()
        assert stream.token_ids == expected
        assert stream.events[0].index == 4


def test_a_sliding_window_is_honoured_in_chunks_and_steps() -> None:
    with harness(decoder=random_decoder(window=8), max_batched_tokens=5) as made:
        assert made.answer(prompt(30), GREEDY).token_ids == reference_ids(made.decoder, prompt(30), GREEDY)


def test_a_slot_used_before_does_not_shine_through() -> None:
    with harness(num_slots=1) as made:
        made.answer(prompt(60), GREEDY)
        assert made.answer(prompt(7), GREEDY).token_ids == reference_ids(made.decoder, prompt(7), GREEDY)


def test_logprobs_pass_through() -> None:
    with harness() as made:
        answer = made.answer(prompt(6), dataclasses.replace(GREEDY, logprobs=3))
        for event in answer.events:
            assert event.token is not None
            assert event.token.logprob == event.token.top[0].logprob
            assert len(event.token.top) == 3


def pushed(made: Harness, ids: tuple[int, ...], params: SamplingParams) -> Collector:
    """A request whose KV was pushed, run to its end."""
    ref = made.reserve(len(ids), len(ids) + params.max_tokens).ref
    made.push_and_commit(ref, ids, params)
    _, stream = made.submit(ids, params, ref=ref)
    made.run(stream)
    return stream
