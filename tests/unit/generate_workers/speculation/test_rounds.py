"""Speculation changes how many tokens a step brings, never which: against the same engine without it."""

import random
from collections.abc import Sequence
from typing import Any

import pytest

from baton.process.clock import SystemClock
from baton.sampling_params import SamplingParams
from baton.types import FinishReason
from generate_workers.config import AcceptanceName
from tests.support.engines.generation import Harness, harness
from tests.support.engines.slot_tables import Policy

SPECULATIONS = ("streaming", "ngram", "auto", "model")
PARAMS = {
    "greedy": SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True),
    "sampled": SamplingParams(max_tokens=24, temperature=0.9, seed=7, ignore_eos=True),
    "filtered": SamplingParams(max_tokens=24, temperature=0.7, top_k=9, top_p=0.9, min_p=0.01, seed=3, ignore_eos=True),
    "penalized": SamplingParams(
        max_tokens=24,
        temperature=0.7,
        seed=5,
        repetition_penalty=1.3,
        frequency_penalty=0.4,
        presence_penalty=0.3,
        logit_bias={4: 2.0, 9: -3.0},
        min_tokens=9,
        logprobs=2,
    ),
    "ends": SamplingParams(max_tokens=24, temperature=1.0, seed=11, stop=("ab", "e")),
}


def prompts(num: int, seed: int = 0) -> list[list[int]]:
    """Prompts of uneven lengths; some repeat themselves."""
    chance = random.Random(seed)
    made = [[chance.randrange(3, 20) for _ in range(chance.randrange(1, 60))] for _ in range(num)]
    return [each if index % 2 else (each * 3)[:60] for index, each in enumerate(made)]


Said = tuple[int, int, list[int], str, FinishReason | None]


def answers(
    asked: Sequence[tuple[list[int], SamplingParams]],
    speculation: str,
    policy: Policy = "device",
    **limits: Any,
) -> tuple[list[list[Said]], list[float]]:
    """Events of streams that run together, stream by stream, and all logprobs."""
    with harness(num_slots=32, max_waiting=32, speculation=speculation, policy=policy, **limits) as made:
        streams = [made.submit(prompt, params)[1] for prompt, params in asked]
        made.run()
    said, logprobs = list[list[Said]](), list[float]()
    for stream in streams:
        said.append([])
        for event in stream.events:
            assert event.token is not None, event.error
            top_ids = [each.token_id for each in event.token.top]
            said[-1].append((event.index, event.token.token_id, top_ids, event.text, event.finish))
            if event.token.logprob is not None:
                logprobs += [event.token.logprob, *(each.logprob for each in event.token.top)]
    return said, logprobs


def check(asked: Sequence[tuple[list[int], SamplingParams]], speculation: str, policy: Policy = "device") -> None:
    """The same without speculation; logprobs as far as sums in fp32 agree."""
    (said, logprobs), (plain, plain_logprobs) = answers(asked, speculation, policy), answers(asked, "off", policy)
    assert said == plain
    assert logprobs == pytest.approx(plain_logprobs, abs=1e-4)


@pytest.mark.parametrize("speculation", SPECULATIONS)
@pytest.mark.parametrize("num_rows", [pytest.param(5, marks=pytest.mark.nightly), 32])
@pytest.mark.parametrize("policy", ["device", "host"])
def test_the_streams_of_a_ragged_batch_are_those_without_speculation(
    policy: Policy, num_rows: int, speculation: str
) -> None:
    """Each row has parameters and a length of its own, so that rows end at different times."""
    params = list(PARAMS.values())
    asked = [(prompt, params[index % len(params)]) for index, prompt in enumerate(prompts(num_rows))]
    check(asked, speculation, policy)


@pytest.mark.parametrize("speculation", SPECULATIONS)
@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_the_stream_of_one_row_is_that_without_speculation(params: SamplingParams, speculation: str) -> None:
    asked = [(prompts(1)[0], params)]
    check(asked, speculation)


def steps_for(made: Harness, prompt: list[int], params: SamplingParams) -> int:
    made.answer(prompt, params)
    return made.engine.status().num_steps


@pytest.mark.parametrize("acceptance", ["coupled", "maximal"])
def test_drafts_over_all_keys_are_all_accepted(acceptance: AcceptanceName) -> None:
    """One token by the step that prefills, then rounds of one and three drafts."""
    params = SamplingParams(max_tokens=1 + 4 * 6, temperature=0.8, seed=3, ignore_eos=True)
    with harness(speculation="streaming", draft_keys=128, acceptance=acceptance) as made:
        assert steps_for(made, prompts(1)[0][:12], params) == 1 + 6


def test_a_row_without_room_for_drafts_goes_on_without() -> None:
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    with harness(speculation="streaming", max_slot_tokens=12) as made:
        ended = made.answer([3, 4, 5, 6], params)
    assert len(ended.token_ids) == 8
    assert ended.finish is FinishReason.LENGTH


@pytest.mark.parametrize("speculation", SPECULATIONS)
def test_the_maximal_rule_leaves_greedy_texts_as_they_are(speculation: str) -> None:
    asked = [(prompt, PARAMS["greedy"]) for prompt in prompts(5)]
    assert answers(asked, speculation, acceptance="maximal")[0] == answers(asked, "off")[0]


@pytest.mark.parametrize("params", [PARAMS["filtered"], PARAMS["penalized"]], ids=["filtered", "penalized"])
def test_the_maximal_rule_over_all_keys_leaves_any_text_as_it_is(params: SamplingParams) -> None:
    """Drafts are drawn by the noise of their tokens, and all accepted."""
    asked = [(prompt, params) for prompt in prompts(4)]
    drafted, _ = answers(asked, "streaming", acceptance="maximal", draft_keys=128)
    assert drafted == answers(asked, "off")[0]


@pytest.mark.parametrize("policy", ["device", pytest.param("host", marks=pytest.mark.ci)])
def test_rounds_that_are_planned_by_their_cost_change_no_text(policy: Policy) -> None:
    """Planned by times on this machine, so that different rounds have drafts in each run."""
    asked = [(prompt, PARAMS["sampled"]) for prompt in prompts(7)]
    assert answers(asked, "auto", policy, draft_tokens=0, clock=SystemClock())[0] == answers(asked, "off")[0]
