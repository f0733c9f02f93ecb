"""The engine's life with its streams: one terminal event each, slots freed before it, whatever happens."""

import dataclasses
from typing import Any

import pytest

from baton.errors import ConfigError, InvalidArgumentError, ResourceExhaustedError
from baton.sampling_params import SamplingParams
from baton.types import FinishReason, RequestId, TokenEvent
from generate_workers.config import EngineConfig
from generate_workers.engine.rows import GenerationRequest
from tests.support.engines.generation import WatchedDecoder, eos_decoder, harness, prompt, reference_ids
from tests.support.engines.slot_tables import is_empty
from tests.support.models.tiny_tokenizer import text_of

SHORT = SamplingParams(max_tokens=4, ignore_eos=True)
LONG = SamplingParams(max_tokens=60, ignore_eos=True)


def test_a_stop_string_cuts_the_text_exactly_and_stops_generating() -> None:
    with harness() as made:
        whole = made.answer(prompt(9), LONG)
        stop = whole.text[20:23]
        cut = whole.text.index(stop)
        num_tokens = next(n for n in range(60) if stop in text_of(whole.token_ids[:n]))
        answer = made.answer(prompt(9), dataclasses.replace(LONG, stop=(stop,)))
        assert answer.text == whole.text[:cut]
        assert answer.token_ids == whole.token_ids[:num_tokens]
        assert answer.finish is FinishReason.STOP


def test_an_end_of_sequence_token_stops_generating() -> None:
    with harness() as made:
        whole = made.answer(prompt(9), LONG)
        decoder = eos_decoder()
        decoder.config = dataclasses.replace(decoder.config, eos_token_ids=(whole.token_ids[10],))
    with harness(decoder=decoder) as made:
        answer = made.answer(prompt(9), dataclasses.replace(LONG, ignore_eos=False))
        num_tokens = whole.token_ids.index(whole.token_ids[10]) + 1
        assert answer.token_ids == whole.token_ids[:num_tokens]
        assert answer.text == text_of(whole.token_ids[: num_tokens - 1])
        assert answer.finish is FinishReason.STOP


def test_a_lease_that_is_full_ends_with_length() -> None:
    with harness() as made:
        ref = made.reserve(10, 13).ref
        made.push_and_commit(ref, prompt(10), LONG)
        _, stream = made.submit(prompt(10), LONG, ref=ref)
        made.run()
        assert (len(stream.token_ids), stream.finish) == (4, FinishReason.LENGTH)
        assert stream.token_ids == reference_ids(made.decoder, prompt(10), LONG)[:4]


def test_a_pushed_first_token_may_be_the_only_one() -> None:
    with harness() as made:
        ref = made.reserve(10, 12).ref
        first = made.push_and_commit(ref, prompt(10), SHORT)
        _, stream = made.submit(prompt(10), dataclasses.replace(SHORT, max_tokens=1), ref=ref)
        made.engine.step()
        assert [event.token for event in stream.events] == [first]
        assert stream.finish is FinishReason.LENGTH
        assert made.engine.status().num_steps == 0


def test_a_pushed_first_token_passes_the_finish_checks() -> None:
    with harness() as made:
        ref = made.reserve(10, 40).ref
        first = made.push_and_commit(ref, prompt(10), SHORT)
        _, stream = made.submit(prompt(10), dataclasses.replace(LONG, stop=(text_of([first.token_id]),)), ref=ref)
        made.engine.step()
        assert (stream.text, stream.finish, stream.token_ids) == ("", FinishReason.STOP, [first.token_id])


def test_the_slot_is_free_when_the_last_event_arrives() -> None:
    with harness(num_slots=1) as made:
        held: list[int] = []

        def look() -> None:
            held.append(made.slots.ledger().num_bytes_held)

        made.submit(prompt(9), SHORT, on_end=look)
        ref = made.reserve(10, 30)
        with pytest.raises(ResourceExhaustedError):
            made.reserve(10, 30)
        made.submit(prompt(9), SHORT, on_end=look)
        made.slots.abort(ref.ref)
        made.run()
        cancelled, _ = made.submit(prompt(9), LONG, on_end=look)
        made.engine.step()
        made.engine.cancel(cancelled)
        made.run()
        assert held == [0, 0, 0]


def test_usage_follows_from_the_events() -> None:
    with harness() as made:
        stream_id, stream = made.submit(prompt(9), LONG)
        for _ in range(5):
            made.engine.step()
        made.engine.cancel(stream_id)
        made.run()
        assert stream.events[-1].index == len(stream.token_ids) == 5
        assert stream.events[-1].token is None


# Waiting for a slot.


def test_local_requests_get_slots_in_the_order_of_arrival() -> None:
    with harness(num_slots=1) as made:
        order: list[int] = []
        for number in range(5):
            made.submit(prompt(5 + number), SHORT, on_end=lambda number=number: order.append(number))  # type: ignore[misc]
        made.run()
        assert order == [0, 1, 2, 3, 4]


def test_too_many_waiting_requests_are_refused_at_once() -> None:
    with harness(num_slots=1, max_waiting=3) as made:
        made.submit(prompt(5), SHORT)
        made.engine.step()
        for _ in range(3):
            made.submit(prompt(5), SHORT)
        with pytest.raises(ResourceExhaustedError, match="3 requests wait"):
            made.submit(prompt(5), SHORT)
        made.run()
        made.answer(prompt(5), SHORT)


def test_requests_that_come_at_once_find_the_free_slots_before_any_is_refused() -> None:
    with harness(num_slots=2, max_waiting=1) as made:
        for _ in range(3):  # no step between: two have a slot to come, one waits
            made.submit(prompt(5), SHORT)
        with pytest.raises(ResourceExhaustedError, match="1 requests wait"):
            made.submit(prompt(5), SHORT)
        made.run()


def test_a_cancelled_waiter_gives_its_place_back() -> None:
    with harness(num_slots=1, max_waiting=1) as made:
        made.submit(prompt(5), SHORT)
        made.engine.step()
        stream_id, _ = made.submit(prompt(5), SHORT)
        made.engine.cancel(stream_id)
        made.engine.step()
        _, next_in_line = made.submit(prompt(5), SHORT)
        made.run()
        assert next_in_line.finish is FinishReason.LENGTH


def test_a_bad_request_opens_nothing() -> None:
    with harness(max_slot_tokens=40) as made:
        with pytest.raises(InvalidArgumentError, match="max_tokens = 60 .* at most 40"):
            made.submit(prompt(5), LONG)
        assert made.engine.status().num_streams == 0


def test_the_models_context_limits_requests_too() -> None:
    with harness(max_slot_tokens=4000) as made, pytest.raises(InvalidArgumentError, match="at most 512"):
        made.submit(prompt(5), dataclasses.replace(LONG, max_tokens=600))


@pytest.mark.parametrize("name", ["num_slots", "max_slot_tokens", "max_batched_tokens", "max_waiting", "growth_tokens"])
def test_config_names_the_bad_field(name: str) -> None:
    fields: dict[str, Any] = {name: 0}
    with pytest.raises(ConfigError, match=f"{name} = 0"):
        EngineConfig(**fields)


@pytest.mark.parametrize("name", ["kv_memory_bytes", "device_memory_bytes"])
def test_config_takes_no_negative_memory(name: str) -> None:
    fields: dict[str, Any] = {name: -1}
    with pytest.raises(ConfigError, match=f"{name} = -1"):
        EngineConfig(**fields)


# Failures.


def test_a_failing_forward_ends_its_rows_and_no_others() -> None:
    error: Exception | None = None

    def fail(*_: object) -> None:
        if error is not None:
            raise error

    decoder = WatchedDecoder(eos_decoder(), fail)
    with harness(decoder=decoder, num_slots=2) as made:
        rows = [made.submit(prompt(9), LONG)[1] for _ in range(2)]
        made.engine.step()
        _, waiting = made.submit(prompt(5), SHORT)
        error = RuntimeError("device lost\nand more")
        made.engine.step()
        assert [row.error for row in rows] == ["RuntimeError: device lost"] * 2
        assert is_empty(made.slots.ledger())
        error = None
        made.run()
        assert waiting.token_ids == reference_ids(decoder, prompt(5), SHORT)


def test_a_sink_that_raises_ends_its_own_row_only() -> None:
    with harness() as made:
        _, other = made.submit(prompt(9), SHORT)
        calls: list[TokenEvent] = []

        def broken(event: TokenEvent) -> None:
            calls.append(event)
            raise RuntimeError("loop is closed")

        made.engine.submit(GenerationRequest(RequestId("broken"), prompt(9), (), LONG), broken)
        made.run(other)
        assert [event.finish for event in calls] == [None, FinishReason.CANCELLED]
        assert other.finish is FinishReason.LENGTH
