"""Where a token becomes an event: text, stop strings and finish reasons, at the very token."""

import dataclasses
from pathlib import Path

import pytest

from baton.errors import InvalidArgumentError
from baton.modeling.checkpoints.registry import ModelConfig
from baton.sampling_params import SamplingParams
from baton.text.stop_strings import StopStrings
from baton.text.tokenizer import Tokenizer
from baton.types import FinishReason, LeaseRef, RequestId, SampledToken, SlotId, Stamp, TokenEvent
from generate_workers.engine.rows import EngineStream, GenerationRequest, Row, StreamId
from generate_workers.slots.leases import BatchSlot
from tests.support.engines.generation import eos_decoder
from tests.support.engines.slot_tables import make_memory
from tests.support.models.tiny_tokenizer import BOS_ID, EOS_ID, VOCAB_SIZE, ids_of, letter_tokenizer
from tests.support.models.tokenizers import sentencepiece_core, sentencepiece_tokens, write_folder

CONFIG = eos_decoder().config


def make_row(
    params: SamplingParams,
    output: tuple[int, ...] = (),
    capacity: int = 64,
    tokenizer: Tokenizer | None = None,
    config: ModelConfig = CONFIG,
    *,
    prompt: tuple[int, ...] = (1, 2, 3),
) -> Row:
    request = GenerationRequest(RequestId("r"), prompt, output, params)
    [promise] = make_memory(max_slot_tokens=capacity).promise([SlotId(0)], request.num_tokens, capacity)
    batch_slot = BatchSlot(LeaseRef(SlotId(0), Stamp(1)), promise.row, None)
    stream = EngineStream(StreamId(1), request, lambda event: None, StopStrings.of(params))
    return Row(stream, 0, batch_slot, tokenizer or letter_tokenizer(), config)


def feed(row: Row, token_ids: tuple[int, ...]) -> list[TokenEvent]:
    """Events of tokens, up to the end of the stream."""
    events: list[TokenEvent] = []
    for token_id in token_ids:
        events.append(row.accept(SampledToken(token_id), unix_ns=5))
        if events[-1].finish is not None:
            break
    return events


def texts(events: list[TokenEvent]) -> list[str]:
    return [event.text for event in events]


def test_each_token_is_an_event_with_its_position_and_text() -> None:
    token = SampledToken(ids_of("h")[0], -0.5)
    event = make_row(SamplingParams(), output=ids_of("oh")).accept(token, unix_ns=5)
    assert event == TokenEvent(2, token, "h", 5)


def test_accepted_tokens_are_known_tokens() -> None:
    row = make_row(SamplingParams(), output=(9,))
    feed(row, (10, 11))
    assert row.token_ids == [1, 2, 3, 9, 10, 11]
    assert row.sampler.output_ids == [9, 10, 11]


def test_the_last_of_max_tokens_ends_the_stream() -> None:
    events = feed(make_row(SamplingParams(max_tokens=3)), ids_of("abcdef"))
    assert texts(events) == ["a", "b", "c"]
    assert events[-1].finish is FinishReason.LENGTH


def test_max_tokens_counts_what_an_earlier_attempt_emitted() -> None:
    assert len(feed(make_row(SamplingParams(max_tokens=5), output=ids_of("abc")), ids_of("defgh"))) == 2


def test_an_end_of_sequence_token_ends_without_text() -> None:
    events = feed(make_row(SamplingParams()), (*ids_of("ab"), EOS_ID, 5))
    assert texts(events) == ["a", "b", ""]
    assert (events[-1].finish, events[-1].token) == (FinishReason.STOP, SampledToken(EOS_ID))


def test_an_ignored_end_of_sequence_token_does_not_end() -> None:
    events = feed(make_row(SamplingParams(ignore_eos=True)), (*ids_of("a"), EOS_ID, *ids_of("b")))
    assert texts(events) == ["a", "", "b"]
    assert events[-1].finish is None


def test_a_stop_token_ends_without_its_text() -> None:
    events = feed(make_row(SamplingParams(stop_token_ids=ids_of("!"))), ids_of("ab!c"))
    assert texts(events) == ["a", "b", ""]
    assert events[-1].finish is FinishReason.STOP


def test_a_stop_string_ends_at_its_last_token_and_is_not_emitted() -> None:
    events = feed(make_row(SamplingParams(stop=("END",))), ids_of("an END of it"))
    assert texts(events) == ["a", "n", " ", "", "", ""]
    assert events[-1].finish is FinishReason.STOP


def test_held_back_text_comes_once_it_cannot_stop_any_more() -> None:
    events = feed(make_row(SamplingParams(stop=("END",))), ids_of("EN E"))
    assert texts(events) == ["", "", "EN ", ""]


@pytest.mark.parametrize("num_done", [0, 4])
@pytest.mark.parametrize(
    ("params", "text"),
    [
        (SamplingParams(min_tokens=10, stop=(",",)), " 8, 9, 10,"),  # commas are tokens 10 and 11
        (SamplingParams(min_tokens=8, stop=(", 10",)), " 8, 9"),
        (SamplingParams(max_tokens=9, min_tokens=9, stop=(", 10",)), " 8, 9, 10"),
        (SamplingParams(min_tokens=4, stop=(", 9",), include_stop_str_in_output=True), " 8, 9"),
        (SamplingParams(stop_token_ids=ids_of("9"), include_stop_str_in_output=True), " 8, 9"),
        (SamplingParams(include_stop_str_in_output=True), " 8, 9, 10,, 12"),
    ],
)
def test_where_a_stop_counts_and_what_is_shown_of_it(params: SamplingParams, text: str, num_done: int) -> None:
    """Also where an earlier attempt emitted the first tokens."""
    token_ids = (*ids_of(" 8, 9, 10,, 12"), EOS_ID)
    events = feed(make_row(params, token_ids[:num_done]), token_ids[num_done:])
    before = "".join(texts(feed(make_row(params), token_ids[:num_done])))
    assert before + "".join(texts(events)) == text
    assert events[-1].finish is not None


@pytest.mark.parametrize("params", [SamplingParams(max_tokens=2, stop=("END",)), SamplingParams(stop=("END",))])
def test_held_back_text_comes_at_the_end(params: SamplingParams) -> None:
    events = feed(make_row(params), (*ids_of("EN"), EOS_ID))
    assert "".join(texts(events)) == "EN"
    assert events[-1].finish is not None


def test_a_stop_string_with_the_last_token_is_a_stop() -> None:
    events = feed(make_row(SamplingParams(max_tokens=2, stop=("ab",))), ids_of("ab"))
    assert (events[-1].finish, "".join(texts(events))) == (FinishReason.STOP, "")


def test_a_stop_string_may_begin_in_an_earlier_attempt() -> None:
    events = feed(make_row(SamplingParams(stop=("END",)), output=ids_of("x EN")), ids_of("Dx"))
    assert (texts(events), events[-1].finish) == ([""], FinishReason.STOP)


def test_a_full_slot_ends_the_stream_after_the_token_that_has_no_room() -> None:
    events = feed(make_row(SamplingParams(), capacity=5), ids_of("abcdef"))
    assert len(events) == 3  # three prompt tokens and "ab" are cached; "c" would be the sixth
    assert events[-1].finish is FinishReason.LENGTH


def test_the_models_context_ends_the_stream_too() -> None:
    config = dataclasses.replace(CONFIG, max_position=4)
    assert len(feed(make_row(SamplingParams(), config=config), ids_of("abcdef"))) == 2


@pytest.mark.parametrize("token_id", [VOCAB_SIZE, -1])
def test_a_token_that_the_model_does_not_have_is_refused(token_id: int) -> None:
    row = make_row(SamplingParams())
    with pytest.raises(InvalidArgumentError):
        row.accept(SampledToken(token_id), unix_ns=5)
    assert row.sampler.position == 0


def test_a_special_token_has_no_text() -> None:
    assert texts(feed(make_row(SamplingParams()), (BOS_ID, *ids_of("a")))) == ["", "a"]


@pytest.mark.parametrize("num_done", range(5))
def test_a_split_character_survives_a_resume(tmp_path: Path, num_done: int) -> None:
    tokenizer = Tokenizer.load(write_folder(tmp_path, sentencepiece_core()))
    token_ids = (*(3 + byte for byte in "\N{GRINNING FACE}".encode()), sentencepiece_tokens().index("hello"))
    config = dataclasses.replace(CONFIG, vocab_size=len(sentencepiece_tokens()))
    whole = texts(feed(make_row(SamplingParams(), tokenizer=tokenizer, config=config), token_ids))
    row = make_row(SamplingParams(), output=token_ids[:num_done], tokenizer=tokenizer, config=config)
    assert "".join(whole) == "\N{GRINNING FACE}hello"
    assert texts(feed(row, token_ids[num_done:])) == whole[num_done:]


@pytest.mark.parametrize("num_done", range(4))
def test_the_first_token_goes_on_with_the_prompt_s_text(tmp_path: Path, num_done: int) -> None:
    """A Llama 2 style tokenizer drops a space at the start of a text; the output is not one. A stop string is found in
    the same text, by the first attempt and by those after it."""
    tokenizer = Tokenizer.load(write_folder(tmp_path, sentencepiece_core()))
    config = dataclasses.replace(CONFIG, vocab_size=len(sentencepiece_tokens()))
    hello, a = map(sentencepiece_tokens().index, ("\u2581hello", "\u2581a"))
    output = (hello, hello, a, hello)
    params = SamplingParams(stop=(" hello a h",))
    row = make_row(params, output[:num_done], tokenizer=tokenizer, config=config, prompt=(1, hello))
    events = feed(row, output[num_done:])
    assert (events[-1].finish, len(events)) == (FinishReason.STOP, 4 - num_done)
    assert num_done or "".join(texts(events)) == " hello"


def check(max_slot_tokens: int = 20, **fields: object) -> None:
    usual = {
        "request_id": RequestId("r"),
        "prompt_ids": (1, 2),
        "output_ids": (),
        "params": SamplingParams(max_tokens=4),
    }
    GenerationRequest(**{**usual, **fields}).check(VOCAB_SIZE, max_slot_tokens, 8)  # type: ignore[arg-type]


def test_a_good_request_passes() -> None:
    check()


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"prompt_ids": ()}, "prompt_ids is empty"),
        ({"prompt_ids": (1, VOCAB_SIZE)}, "prompt_ids holds 97: .* end at 96"),
        ({"output_ids": (VOCAB_SIZE + 3,)}, "output_ids holds 100: .* end at 96"),
        ({"output_ids": (1, 2, 3, 4)}, "output_ids holds 4 tokens already: max_tokens is 4"),
        ({"params": SamplingParams(max_tokens=19)}, "max_tokens = 19 .* at most 20 tokens"),
    ],
)
def test_a_bad_request_is_refused_by_field_and_limit(fields: dict[str, object], text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=text):
        check(**fields)  # type: ignore[arg-type]


def test_a_request_may_fill_a_slot_exactly() -> None:
    check(params=SamplingParams(max_tokens=18))
