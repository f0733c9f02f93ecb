"""Forms are compiled in child processes: what exceeds a limit is refused, and no process ends but a child."""

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from baton.errors import InvalidArgumentError, ResourceExhaustedError, UnavailableError
from baton.sampling_params import StructuredOutput
from baton.text import form_prover
from baton.text.form_prover import FormProver
from tests.support.eventually import eventually
from tests.support.models.tiny_tokenizer import EOS_ID, ids_of, letter_tokenizer

pytestmark = pytest.mark.integration

SIMPLE = StructuredOutput(regex="ab+")
# 99 million remainders, each a state
SLOW = StructuredOutput(json='{"type": "integer", "allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}]}')
LARGE = StructuredOutput(regex=r"(\p{L}|\p{N}|\w)*" * 2000)
UNBOUNDED = {
    "rules": StructuredOutput(grammar="start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(2750)) + 'r2750: "a"'),
    "terminals": StructuredOutput(
        grammar="start: T0\n" + "".join(f"T{i}: T{i + 1}\n" for i in range(3700)) + 'T3700: "a"'
    ),
    "GBNF": StructuredOutput(
        grammar="root ::= r0\n" + "".join(f"r{i} ::= r{i + 1}\n" for i in range(15000)) + 'r15000 ::= "a"'
    ),
    "references": StructuredOutput(
        json=json.dumps(
            {
                "$ref": "#/$defs/a0",
                "$defs": {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(2700)} | {"a2700": {"type": "boolean"}},
            }
        )
    ),
    "multiple": StructuredOutput(json='{"type": "integer", "multipleOf": 9999991}'),
}


@pytest.fixture
async def prover() -> AsyncIterator[FormProver]:
    made = FormProver(letter_tokenizer().to_json, (EOS_ID,), cpu_s=0.5)
    yield made
    await made.close()


def children() -> list[int]:
    """Process ids of this process's children that compile forms."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread or a child that has just ended
            for pid in (task / "children").read_text().split():
                if b"baton.text.form_child" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.append(int(pid))
    return found


@pytest.mark.parametrize("form", UNBOUNDED.values(), ids=UNBOUNDED)
async def test_what_once_ended_the_process_or_took_minutes_is_refused_before_it_is_compiled(
    prover: FormProver, form: StructuredOutput
) -> None:
    with pytest.raises(InvalidArgumentError, match="use at most|lead from one to the next"):
        await prover.prove(form)
    first = children()
    await prover.prove(SIMPLE)
    assert children() == first, "no child ended"


@pytest.mark.parametrize("form", [SLOW, LARGE], ids=["slow", "large"])
async def test_a_form_that_ends_its_child_is_refused_once_and_for_all(
    prover: FormProver, form: StructuredOutput
) -> None:
    await prover.prove(SIMPLE)
    (before,) = children()
    with pytest.raises(
        InvalidArgumentError, match="cannot be compiled within 0.5 s of a processor, 256 MiB"
    ) as refused:
        await prover.prove(form)
    assert children() == []
    with pytest.raises(InvalidArgumentError) as again:
        await prover.prove(form)
    assert (str(again.value), children()) == (str(refused.value), [])
    await prover.prove(StructuredOutput(regex="c"))
    (after,) = children()
    assert after != before


async def test_a_child_that_something_else_ends_says_nothing_of_the_form(prover: FormProver) -> None:
    await prover.prove(SIMPLE)
    os.kill(children()[0], signal.SIGKILL)
    assert (await prover.prove(StructuredOutput(regex="c"))).compiled_bytes > 0


async def test_compiled_bytes_are_measured(prover: FormProver) -> None:
    small = await prover.prove(SIMPLE)
    large = await prover.prove(StructuredOutput(json='{"type": "integer", "multipleOf": 9973}'))
    assert 0 < small.compiled_bytes < 2**20 < large.compiled_bytes


async def test_outputs_that_have_begun_must_be_of_the_form(prover: FormProver) -> None:
    await prover.prove(SIMPLE, [(), ids_of("ab"), (*ids_of("ab"), EOS_ID)])
    with pytest.raises(InvalidArgumentError, match="output token 1 .* is none that sampling.structured_output allows"):
        await prover.prove(SIMPLE, [ids_of("ab"), ids_of("ax")])
    await prover.prove(SIMPLE)  # the form itself is sound
    with pytest.raises(InvalidArgumentError, match="regex cannot be compiled"):
        await prover.prove(StructuredOutput(regex="a(b"), [ids_of("a")])


async def test_an_owner_s_forms_take_turns_and_another_s_does_not_wait_for_them(prover: FormProver) -> None:
    mine = [asyncio.create_task(prover.prove(form, owner="mine")) for form in (SLOW, LARGE)]
    await eventually(lambda: _number_of(children), lambda number: number == 1)
    (held,) = children()
    os.kill(held, signal.SIGSTOP)
    assert (await prover.prove(SIMPLE, owner="other")).compiled_bytes > 0
    assert not any(each.done() for each in mine)
    os.kill(held, signal.SIGCONT)
    assert {type(end) for end in await asyncio.gather(*mine, return_exceptions=True)} == {InvalidArgumentError}


async def test_a_client_that_leaves_does_not_give_the_turn_away(prover: FormProver) -> None:
    left = asyncio.create_task(prover.prove(SLOW, owner="mine"))
    await eventually(lambda: _number_of(children), lambda number: number == 1)
    left.cancel()
    await asyncio.gather(left, return_exceptions=True)
    await prover.prove(SIMPLE, owner="mine")
    before = children()
    with pytest.raises(InvalidArgumentError):
        await prover.prove(SLOW, owner="mine")
    assert children() == before, "it was compiled for the client that left"


async def test_equal_forms_of_a_burst_are_compiled_once(prover: FormProver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(form_prover, "MAX_PROOFS", 1)
    proven = await asyncio.gather(*(prover.prove(SIMPLE, owner=f"tenant-{number}") for number in range(200)))
    assert len({form.compiled_bytes for form in proven}) == 1


async def test_a_full_queue_is_said_with_a_delay(prover: FormProver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(form_prover, "MAX_PROOFS", 1)
    first = asyncio.create_task(prover.prove(SIMPLE))
    await asyncio.sleep(0)
    with pytest.raises(ResourceExhaustedError, match="1 forms of structured output are being compiled") as full:
        await prover.prove(StructuredOutput(regex="c"))
    assert full.value.retry_after_s == 1.0
    await first


async def test_kept_answers_are_bounded(prover: FormProver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(form_prover, "MAX_PROVEN_BYTES", 3000)
    for letter in "abcd":
        await prover.prove(StructuredOutput(regex=letter))
    assert [form.regex for form in prover._kept] == ["c", "d"]


async def test_closing_ends_the_proofs_that_run() -> None:
    made = FormProver(letter_tokenizer().to_json, (EOS_ID,), cpu_s=3600.0)
    running = asyncio.create_task(made.prove(SLOW))
    await eventually(lambda: _number_of(children), lambda number: number == 1)
    os.kill(children()[0], signal.SIGSTOP)
    await asyncio.wait_for(made.close(), 30)
    with pytest.raises(UnavailableError, match="no longer compiles forms"):
        await running
    assert children() == []


async def test_a_model_without_an_end_is_refused() -> None:
    made = FormProver(letter_tokenizer().to_json, ())
    with pytest.raises(InvalidArgumentError, match="has no end-of-sequence token"):
        await made.prove(SIMPLE)
    await made.close()
    await made.close()
    assert children() == []


async def _number_of(found: object) -> int:
    assert callable(found)
    return len(found())
