"""Constrained outputs of the real engine, sampled at temperature 1: whatever a random model would say, what ends by
itself has its form; the jsonschema package says so, with and without drafts, and across a resumption."""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jsonschema
import pytest

from baton.errors import InvalidArgumentError
from baton.sampling_params import SamplingParams, StructuredOutput
from baton.types import FinishReason, RequestId, SampledToken
from generate_workers.config import SpeculationName
from generate_workers.engine.rows import GenerationRequest, StreamId
from generate_workers.slots.kv_memory import MemoryLimits
from tests.support.engines.generation import Collector, Harness, eos_decoder, harness, prompt
from tests.support.engines.slot_tables import page_bytes
from tests.support.models.tiny_tokenizer import EOS_ID, HeldGrammars, ids_of, letter_grammars, text_of
from tests.support.schemas import Schema, random_schema, suite_schemas

MAX_TOKENS = 160
TERSE: Mapping[int, float] = {ids_of('"')[0]: 4.0, ids_of("}")[0]: 3.0, ids_of("]")[0]: 3.0, EOS_ID: 3.0}
"""Makes the random model come to an end: of what is allowed, what ends a string or a value is likelier."""
DRAFTED: tuple[SpeculationName, ...] = ("off", "ngram", "model")


def params_of(schema: Schema, seed: int) -> SamplingParams:
    form = StructuredOutput(json=json.dumps(schema))
    return SamplingParams(max_tokens=MAX_TOKENS, temperature=1.0, seed=seed, logit_bias=TERSE, structured_output=form)


def is_complete(schema: Schema, collector: Collector) -> bool:
    """Return whether the answer is complete. A complete answer must be valid."""
    assert collector.finish in (FinishReason.STOP, FinishReason.LENGTH), collector.events[-1]
    if collector.finish is FinishReason.LENGTH:
        assert len(collector.token_ids) == MAX_TOKENS
        return False
    assert collector.token_ids[-1] == EOS_ID
    assert collector.text == text_of(collector.token_ids)
    jsonschema.Draft202012Validator(schema).validate(json.loads(collector.text))
    return True


def check_followed(made: Harness, schemas: Sequence[Schema], least_share: float) -> None:
    """Every complete answer is valid, and at least so many are complete."""
    asked = [made.submit(prompt(5), params_of(schema, seed))[1] for seed, schema in enumerate(schemas)]
    made.run(max_steps=20_000)
    num_complete = sum(is_complete(*each) for each in zip(schemas, asked, strict=True))
    print(f"{num_complete} of {len(schemas)} answers are complete, all of them valid")
    assert num_complete > least_share * len(schemas)


@pytest.fixture(params=DRAFTED)
def made(request: pytest.FixtureRequest) -> Iterator[Harness]:
    with harness(num_slots=8, max_slot_tokens=256, max_waiting=1000, speculation=request.param) as found:
        yield found


@pytest.mark.parametrize("num_schemas", [60, pytest.param(300, marks=pytest.mark.nightly)])
def test_random_schemas_are_followed(made: Harness, num_schemas: int) -> None:
    check_followed(made, [random_schema(seed) for seed in range(num_schemas)], 0.9)


@pytest.mark.parametrize(
    "made", ["off", *(pytest.param(each, marks=pytest.mark.ci) for each in ("ngram", "model"))], indirect=True
)
def test_the_supported_part_of_the_public_suite_is_followed(made: Harness) -> None:
    check_followed(made, supported_part(), 0.5)


def supported_part() -> list[Schema]:
    grammars = letter_grammars()
    found = []
    for _, schema in suite_schemas():
        try:
            grammars.compile(StructuredOutput(json=json.dumps(schema)))
        except InvalidArgumentError:
            continue
        found.append(schema)
    assert len(found) > 100
    return found


def test_a_resumed_output_goes_on_as_if_it_had_not_been_interrupted(made: Harness) -> None:
    all_params = [params_of(random_schema(seed), seed) for seed in range(20)]
    whole = [made.submit(prompt(5), params)[1] for params in all_params]
    made.run()
    resumed = [
        (before, num_given, made.submit(prompt(5), params, before.token_ids[:num_given])[1])
        for params, before in zip(all_params, whole, strict=True)
        for num_given in (1, 7, 23)
        if len(before.token_ids) > num_given
    ]
    made.run()
    for before, num_given, after in resumed:
        assert [*before.token_ids[:num_given], *after.token_ids] == before.token_ids
        assert after.finish is before.finish
    assert len(resumed) > 40


FORM = StructuredOutput(regex="[a-d]{40}[0-9]{5}")
PATTERN = SamplingParams(max_tokens=80, temperature=1.0, seed=4, structured_output=FORM)


def check_pattern(collector: Collector) -> None:
    assert collector.finish is FinishReason.STOP
    assert re.fullmatch(FORM.regex or "", collector.text)


def test_rows_that_are_preempted_keep_their_form() -> None:
    decoder = eos_decoder()
    limits = MemoryLimits(2 * page_bytes(96, decoder.layout))
    with harness(decoder=decoder, limits=limits, growth_tokens=1) as made:
        crowded = [made.submit(prompt(length), PATTERN)[1] for length in (30, 31, 32, 33)]
        made.run()
        assert made.engine.status().num_preemptions > 0
        for length, collector in zip((30, 31, 32, 33), crowded, strict=True):
            check_pattern(collector)
            assert collector.token_ids == made.answer(prompt(length), PATTERN).token_ids


def test_each_choice_has_the_form(made: Harness) -> None:
    _, collector = made.submit(prompt(9), replace(PATTERN, n=4))
    made.run(collector)
    texts = [collector.choice(number) for number in range(4)]
    for choice in texts:
        check_pattern(choice)
    assert len({choice.text for choice in texts}) > 1


@pytest.mark.parametrize(
    "fields", [{"top_k": 3}, {"top_p": 0.2}, {"min_p": 0.9}, {"temperature": 0.0}, {"logprobs": 20}]
)
def test_filters_choose_among_what_the_form_allows(made: Harness, fields: dict[str, Any]) -> None:
    collector = made.answer(prompt(9), replace(PATTERN, **fields))
    check_pattern(collector)
    for event in collector.events:
        assert event.token is not None
        assert all(math.isfinite(each.logprob) for each in event.token.top)


def test_drafts_change_nothing_but_the_number_of_steps() -> None:
    answers = []
    for speculation in DRAFTED:
        with harness(speculation=speculation) as made:
            answers.append(made.answer(prompt(9), PATTERN).token_ids)
            status = made.engine.status().speculation
            assert speculation == "off" or (status is not None and status.num_accepted > 0)
    assert answers[0] == answers[1] == answers[2]


@pytest.mark.parametrize("speculation", ["ngram", "model"])
def test_maximal_acceptance_keeps_the_form(speculation: SpeculationName) -> None:
    with harness(speculation=speculation, acceptance="maximal") as made:
        for seed in range(10):
            check_pattern(made.answer(prompt(9), replace(PATTERN, seed=seed)))


def test_a_stop_string_and_a_stop_token_end_the_output_where_they_come() -> None:
    form = StructuredOutput(regex="[ab]*c[ab]*d[ab]*")
    params = SamplingParams(max_tokens=100, temperature=1.0, seed=3, structured_output=form)
    with harness() as made:
        whole = made.answer(prompt(9), params).text
        stopped = made.answer(prompt(9), replace(params, stop=("c",)))
        assert (stopped.text, stopped.finish) == (whole[: whole.index("c")], FinishReason.STOP)
        ended = made.answer(prompt(9), replace(params, stop_token_ids=ids_of("c")))
        assert (ended.text, ended.finish) == (whole[: whole.index("c")], FinishReason.STOP)


def test_a_row_whose_output_leaves_its_form_ends_alone() -> None:
    with harness() as made:
        other = made.submit(prompt(7), PATTERN)[1]
        lease = made.reserve(9, 9 + PATTERN.max_tokens)
        free = replace(PATTERN, structured_output=StructuredOutput(regex="X+"))  # as an older prefill worker would
        made.push(lease.ref, prompt(9))
        made.commit(lease.ref, SampledToken(ids_of("y")[0]))
        wrong = made.submit(prompt(9), free, ref=lease.ref)[1]
        made.run()
        assert wrong.finish is FinishReason.ERROR and "output token 0 " in wrong.error
        check_pattern(other)


def test_a_form_that_cannot_be_compiled_ends_its_stream() -> None:
    with harness() as made:
        refused = made.submit(prompt(7), replace(PATTERN, structured_output=StructuredOutput(regex="a(b")))[1]
        other = made.submit(prompt(7), PATTERN)[1]
        made.run()
        assert refused.finish is FinishReason.ERROR and "unclosed group" in refused.error
        check_pattern(other)


def test_a_stream_that_is_cancelled_while_its_form_is_compiled_leaves_nothing() -> None:
    with harness() as made:
        lease = made.reserve(9, 9 + PATTERN.max_tokens)
        collector = Collector()
        request = GenerationRequest(RequestId("gone"), prompt(9), (), PATTERN, lease.ref)
        stream_id = made.engine.submit(request, collector)
        made.engine.cancel(stream_id)
        made.engine.step()
        assert collector.finish is FinishReason.CANCELLED


def test_forms_of_streams_that_end_while_they_wait_are_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("generate_workers.engine.core.Grammars", HeldGrammars)
    forms = [StructuredOutput(regex=f"a{{{size}}}") for size in range(1, 5)]
    with harness() as made:
        grammars, ids = made.engine._grammars, list[StreamId]()
        assert isinstance(grammars, HeldGrammars)
        leases = [made.reserve(9, 9 + PATTERN.max_tokens) for _ in forms]
        collectors = [Collector() for _ in forms]
        for form, lease, collector in zip(forms, leases, collectors, strict=True):
            params = replace(PATTERN, structured_output=form)
            request = GenerationRequest(RequestId("r"), prompt(9), (), params, lease.ref)
            ids.append(made.engine.submit(request, collector))
        assert grammars.is_begun.wait(60)
        made.engine.cancel(ids[1])
        made.engine.cancel(ids[2])
        made.engine.step()
        assert [each.finish for each in collectors] == [None, FinishReason.CANCELLED, FinishReason.CANCELLED, None]
        last = made.engine._queue.streams()[-1].masks
        assert last is not None
        grammars.may_end.set()
        last.result(60)
        assert grammars.begun == [forms[0], forms[3]]
        for stream_id in ids:
            made.engine.cancel(stream_id)
        made.engine.step()
