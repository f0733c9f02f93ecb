"""Forms are compiled once, refused with the place and the remedy, and end where they are complete."""

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest

from baton.errors import InvalidArgumentError
from baton.sampling_params import StructuredOutput
from baton.text.grammars import Grammars
from baton.text.token_masks import Mask
from tests.support.models.tiny_tokenizer import EOS_ID, HeldGrammars, ids_of, letter_tokenizer, text_of


def grammars(**fields: Any) -> Grammars:
    return Grammars(letter_tokenizer().to_json, (EOS_ID,), **fields)


def next_of(mask: Mask) -> str:
    """Letters that may come next; `$` is the end."""
    allowed = [token_id for token_id, most in enumerate(mask) if most > 0]
    return "".join("$" if token_id == EOS_ID else text_of([token_id]) for token_id in allowed)


@pytest.mark.parametrize(
    ("form", "given", "expected"),
    [
        (StructuredOutput(regex="ab?c*"), "", "a"),
        (StructuredOutput(regex="ab?c*"), "a", "bc$"),
        (StructuredOutput(regex="ab?c*"), "abc", "c$"),
        (StructuredOutput(choice=("yes", 'no "x"')), "", "ny"),
        (StructuredOutput(choice=("yes", 'no "x"')), "yes", "$"),
        (StructuredOutput(grammar='start: "(" start ")" | "x"'), "((x)", ")"),
        (StructuredOutput(grammar='start: "(" start ")" | "x"'), "((x))", "$"),
        (StructuredOutput(grammar='root ::= "a" | "b"'), "", "ab"),
        (StructuredOutput(json='{"type": "boolean"}'), "tru", "e"),
        (StructuredOutput(json="true"), "tru", "e"),
        (StructuredOutput(json_object=True), "", "{"),
    ],
)
def test_the_end_is_allowed_where_the_form_is_complete(form: StructuredOutput, given: str, expected: str) -> None:
    matcher = grammars().compile(form).matcher()
    matcher.consume(ids_of(given))
    assert sorted(next_of(matcher.mask())) == sorted(expected)


def test_after_the_end_only_the_end_is_allowed_and_it_can_be_undone() -> None:
    matcher = grammars().compile(StructuredOutput(regex="ab?")).matcher()
    matcher.consume([*ids_of("a"), EOS_ID, EOS_ID])
    assert next_of(matcher.mask()) == "$"
    assert matcher.num_allowed(ids_of("b")) == 0
    matcher.go_to(1)
    assert next_of(matcher.mask()) == "b$"


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        (
            {"properties": {"a/b": {"items": {"uniqueItems": True}}}},
            r'at #/properties/a~1b/items: Unimplemented keys: \["uni',
        ),
        ({"$defs": {"x": {"not": {}}}, "anyOf": [{"type": "null"}, {"$ref": "#/$defs/x"}]}, "at #/\\$defs/x: Unimpl"),
        ({"anyOf": [{"type": "null"}, {"type": "strin"}]}, "at #/anyOf/1: Invalid type: strin"),
        ({"items": {"pattern": "(a", "type": "string"}}, "at #/items: regex parse error"),
        ({"$ref": "https://example.com/schema"}, "at #: Resource"),
        ({"allOf": [{"type": "null"}, {"type": "string"}]}, "at #: Unsatisfiable schema"),
        ({"x-guidance": {"lenient": True}, "not": {}}, "at #: Unimplemented"),
        ([], r"json is \[\]: a schema that has answers is an object"),
        (False, "json is False: a schema that has answers is an object"),
    ],
)
def test_a_schema_is_refused_with_the_place_of_its_fault(schema: object, reason: str) -> None:
    with pytest.raises(InvalidArgumentError, match=reason):
        grammars().compile(StructuredOutput(json=json.dumps(schema)))


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        (StructuredOutput(json="{"), "json is not valid JSON"),
        (StructuredOutput(json="[" * 100_000), "json is not valid JSON"),
        (StructuredOutput(regex="a(b"), "regex cannot be compiled: .*unclosed group"),
        (StructuredOutput(regex="(?=a)b"), "regex cannot be compiled: .*look-around"),
        (StructuredOutput(regex="(a{1000}){1000}"), "regex cannot be compiled: .*too many expressions"),
        (StructuredOutput(regex=r"[^\s\S]"), "regex cannot be compiled"),
        (StructuredOutput(grammar="start: x"), 'grammar cannot be compiled: .*unknown name: "x"'),
        (StructuredOutput(grammar="garbage"), "grammar cannot be compiled"),
    ],
)
def test_a_form_that_cannot_be_followed_is_refused(form: StructuredOutput, reason: str) -> None:
    with pytest.raises(InvalidArgumentError, match=reason):
        grammars().compile(form)


def test_a_model_without_an_end_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="has no end-of-sequence token"):
        Grammars(letter_tokenizer().to_json, ()).compile(StructuredOutput(regex="a"))


def test_a_tokenizer_that_is_not_known_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="tokenizer is not supported"):
        Grammars(lambda: "{}", (EOS_ID,)).compile(StructuredOutput(regex="a"))


def test_the_cache_is_bounded_and_drops_what_was_used_least_recently() -> None:
    made = grammars(max_bytes=2 * 64 * 2**10)  # what a grammar counts as that was not measured
    forms = [StructuredOutput(regex=letter) for letter in "abc"]
    first, second = made.compile(forms[0]), made.compile(forms[1])
    assert made.compile(forms[0]) is first
    made.compile(forms[2])
    assert made.compile(forms[0]) is first
    assert made.compile(forms[1]) is not second
    large = made.compile(StructuredOutput(regex="d", compiled_bytes=10**6))  # alone too large to be kept
    assert made.compile(StructuredOutput(regex="d", compiled_bytes=10**6)) is not large


def test_the_tokenizer_is_loaded_at_the_first_use() -> None:
    loads: list[str] = []

    def load() -> str:
        loads.append(letter_tokenizer().to_json())
        return loads[-1]

    made = Grammars(load, (EOS_ID,))
    assert not loads
    made.compile(StructuredOutput(regex="a"))
    made.compile(StructuredOutput(regex="b"))
    assert len(loads) == 1


def test_tokens_that_are_not_of_the_form_are_refused() -> None:
    made = grammars()
    try:
        prepared = made.prepare(StructuredOutput(regex="abc"), ids_of("ax"))
        with pytest.raises(InvalidArgumentError, match="output token 1 "):
            prepared.result(60)
    finally:
        made.close()


def test_a_quick_form_waits_for_the_form_that_is_compiled_and_not_for_those_that_wait() -> None:
    """Two tenants keep an engine's thread busy with accepted forms of seconds."""
    slow = [StructuredOutput(regex=f"a{{{size}}}", compiled_bytes=200 * 2**20) for size in range(1, 9)]
    quick = StructuredOutput(regex="yes|no", compiled_bytes=3000)
    with closing(HeldGrammars(letter_tokenizer().to_json, (EOS_ID,))) as made:
        prepared = [made.prepare(form, ()) for form in slow[:4]]
        assert made.is_begun.wait(60)
        prepared += [made.prepare(form, ()) for form in (slow[4], quick, *slow[5:])]
        made.may_end.set()
        for each in prepared:
            each.result(60)
        assert made.begun == [slow[0], quick, *slow[1:]]


def test_a_form_that_is_cancelled_while_it_waits_is_not_compiled() -> None:
    forms = [StructuredOutput(regex=f"a{{{size}}}", compiled_bytes=200 * 2**20) for size in range(1, 5)]
    with closing(HeldGrammars(letter_tokenizer().to_json, (EOS_ID,))) as made:
        first, *waiting, last = [made.prepare(form, ()) for form in forms]
        assert made.is_begun.wait(60)
        assert not first.cancel()
        assert all(each.cancel() for each in waiting)
        made.may_end.set()
        for each in (first, last):
            each.result(60)
        made.prepare(forms[0], ()).result(60)  # also after the tasks of those that were cancelled
        assert made.begun == [forms[0], forms[-1], forms[0]]


def test_forms_that_wait_are_given_up_at_the_end() -> None:
    made = grammars()
    prepared = [made.prepare(StructuredOutput(regex=f"a{{{size}}}"), ()) for size in range(1, 50)]
    made.close()
    assert all(each.done() for each in prepared)
    made.prepare(StructuredOutput(regex="b"), ()).result(60)  # of a later thread
    made.close()


def test_prepared_masks_of_choices_go_their_own_ways() -> None:
    made = grammars()
    try:
        one, two = made.prepare(StructuredOutput(regex="a(bc|de)"), ids_of("a"), 2).result(60)
        one.append(ids_of("b")[0])
        two.append(ids_of("d")[0])
        assert (next_of(one.allowed()), next_of(two.allowed())) == ("c", "e")
    finally:
        made.close()


def test_grammars_compiled_by_many_threads_at_once_are_alike() -> None:
    made = grammars()
    with ThreadPoolExecutor(4) as pool:
        found = list(
            pool.map(lambda _: next_of(made.compile(StructuredOutput(regex="[a-c]x")).matcher().mask()), range(40))
        )
    assert set(found) == {"abc"}
