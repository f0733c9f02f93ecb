"""Which requests an engine names in its crash note: those whose first tokens its step computes, and only meanwhile."""

from collections.abc import Sequence

import pytest

from baton.process.crash_notes import NUM_WATCHED_TOKENS, fingerprint
from baton.sampling_params import SamplingParams
from generate_workers.engine.core import GenerationEngine
from tests.support.engines.generation import harness, prompt


class Noted:
    """Remembers what an engine notes, in place of its note."""

    def __init__(self, engine: GenerationEngine) -> None:
        self.steps: list[tuple[bytes, ...]] = []
        """What was named in each step."""
        self.is_open = False
        vars(engine._pipeline)["_computed"] = self

    def set(self, names: tuple[bytes, ...]) -> None:
        if self.is_open:
            assert names == (), "something is named between two steps"
        else:
            self.steps.append(names)
        self.is_open = not self.is_open


def names(*requests: tuple[int, Sequence[int]]) -> tuple[bytes, ...]:
    return tuple(fingerprint(f"r{number}", ids) for number, ids in requests)


@pytest.mark.parametrize("num_given", [0, 3])
def test_a_request_is_named_while_its_first_tokens_are_computed(num_given: int) -> None:
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    with harness(max_batched_tokens=16) as made:
        noted = Noted(made.engine)
        ids, given = prompt(20), prompt(num_given)
        made.answer(ids, params, given)
        num_steps = 1 + NUM_WATCHED_TOKENS  # the prompt takes two of them, and the second has a token
        assert noted.steps[:num_steps] == [names((0, ids))] * num_steps
        assert noted.steps[num_steps:] == [()] * (12 - num_given - NUM_WATCHED_TOKENS)


def test_only_requests_of_the_step_are_named_and_ended_ones_never() -> None:
    with harness(num_slots=3, max_batched_tokens=16) as made:
        noted = Noted(made.engine)
        first, second = prompt(16), prompt(10, 1)
        made.submit(first, SamplingParams(max_tokens=1))
        made.submit(second, SamplingParams(max_tokens=2, ignore_eos=True, n=2))
        made.run()
        assert noted.steps == [names((0, first)), names((1, second)), names((1, second))]


def test_pushed_requests_are_named_until_they_have_as_many_tokens() -> None:
    params, ids = SamplingParams(max_tokens=9, ignore_eos=True), prompt(12)
    with harness() as made:
        noted = Noted(made.engine)
        lease = made.reserve(len(ids), len(ids) + 9)
        made.submit(ids, params, ref=lease.ref)
        made.push_and_commit(lease.ref, ids, params)
        made.run()
        num = NUM_WATCHED_TOKENS - 1  # one came with the KV
        assert noted.steps[:num] == [names((0, ids))] * num
        assert not any(noted.steps[num:])


def test_a_step_that_fails_leaves_nothing_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with harness() as made:
        noted = Noted(made.engine)

        def fail(*_: object, **__: object) -> None:
            raise RuntimeError("broken")

        monkeypatch.setattr(made.engine._pipeline._runner, "run", fail)
        _, collector = made.submit(prompt(8), SamplingParams(max_tokens=1))
        made.run()
        assert "broken" in collector.error
        assert not noted.is_open
