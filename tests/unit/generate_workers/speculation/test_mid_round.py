"""Ends and changes in the middle of a round: texts, events and finish reasons are those of plain steps."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import pytest

from baton.modeling.forward.decoder import Decoder
from baton.planning.speculation import MOST_DRAFTS
from baton.sampling_params import SamplingParams
from baton.types import FinishReason, RequestId, TokenEvent
from generate_workers.config import AcceptanceName, SpeculationName
from generate_workers.engine.rows import GenerationRequest, Row
from generate_workers.engine.speculation import Speculation
from generate_workers.slots.table import SlotTable
from tests.support.engines.drafting import Curbed, Told
from tests.support.engines.generation import (
    Collector,
    Harness,
    eos_decoder,
    harness,
    prefilled,
    prompt,
    reference_ids,
)
from tests.support.engines.slot_tables import is_empty
from tests.support.models.tiny_tokenizer import text_of

IDS = prompt(20)
SAMPLED = SamplingParams(max_tokens=24, temperature=0.9, seed=7, ignore_eos=True)
GREEDY = replace(SAMPLED, temperature=0.0)
RULES: list[AcceptanceName] = ["coupled", "maximal"]
DECODER = eos_decoder()


def others_in_ci(first: object, *others: object) -> list[object]:
    """A test's parameters; all but the first are marked ci."""
    return [first, *(pytest.param(each, marks=pytest.mark.ci) for each in others)]


def known(params: SamplingParams) -> list[int]:
    """The output, as one process has it that does not stop."""
    return reference_ids(DECODER, IDS, replace(params, ignore_eos=True))


def right(outputs: Sequence[int], num_right: int, row: Row) -> list[int]:
    """Drafts of a round, of which the first so many are right, and all others wrong."""
    at = row.sampler.position
    wrong = [(token_id + 1) % DECODER.config.vocab_size for token_id in outputs[at + num_right :]]
    return [*outputs[at : at + num_right], *wrong][:MOST_DRAFTS]


Seen = tuple[list[tuple[object, ...]], list[float]]


def seen(made: Harness, params: SamplingParams) -> Seen:
    """All that a stream brings, and the logprobs."""
    said, logprobs = list[tuple[object, ...]](), list[float]()
    for event in made.answer(IDS, params).events:
        assert event.token is not None, event.error
        top = event.token.top
        said.append((event.index, event.token.token_id, event.text, event.finish, [each.token_id for each in top]))
        if event.token.logprob is not None:
            logprobs += [event.token.logprob, *(each.logprob for each in top)]
    return said, logprobs


def check(
    params: SamplingParams, num_right: int, acceptance: AcceptanceName, decoder: Decoder = DECODER
) -> list[tuple[int, int]]:
    """The events are those of plain steps; returns how many drafts were accepted, and how many there were."""
    told: list[Told] = []

    def make(slots: SlotTable, configured: Speculation | None) -> Told:
        told.append(Told(slots, partial(right, known(params), num_right)))
        return told[0]

    with harness(decoder=decoder) as made:
        plain, plain_logprobs = seen(made, params)
    with harness(decoder=decoder, acceptance=acceptance, speculator=make) as made:
        said, logprobs = seen(made, params)
    assert said == plain
    assert logprobs == pytest.approx(plain_logprobs, abs=1e-4)
    return told[0].accepted


@pytest.mark.parametrize("num_right", others_in_ci(5, 0, 1, MOST_DRAFTS))
@pytest.mark.parametrize("acceptance", others_in_ci("maximal", "coupled"))
@pytest.mark.parametrize("ends", ["stop string", "stop token", "end of text", "length", "min_tokens"])
def test_a_text_that_ends_in_a_round_ends_as_without_drafts(
    ends: str, acceptance: AcceptanceName, num_right: int
) -> None:
    """Greedily, where both rules of acceptance are the same; at each place of a round."""
    outputs, decoder = known(GREEDY), eos_decoder()
    for place in range(3, 14, 2):
        token_id = outputs[place]
        params = {
            "stop string": replace(GREEDY, stop=(text_of(outputs[place - 1 : place + 1]),), logprobs=2),
            "stop token": replace(GREEDY, stop_token_ids=(token_id,), logprobs=2),
            "end of text": replace(GREEDY, ignore_eos=False),
            "length": replace(GREEDY, max_tokens=place, logprobs=0),
            "min_tokens": replace(GREEDY, stop_token_ids=(outputs[0], token_id), min_tokens=place, logprobs=1),
        }[ends]
        decoder.config = replace(decoder.config, eos_token_ids=(token_id,))
        accepted = check(params, num_right, acceptance, decoder)
        assert accepted and all(num <= min(num_right, num_drafts) for num, num_drafts in accepted), accepted
        assert max(num for num, _ in accepted) >= min(num_right, 1)


@pytest.mark.parametrize("num_right", others_in_ci(3, 0, MOST_DRAFTS))
def test_sampled_texts_with_all_options_end_in_a_round_as_without_drafts(num_right: int) -> None:
    params = replace(SAMPLED, repetition_penalty=1.2, frequency_penalty=0.3, logit_bias={4: 1.0}, logprobs=3)
    outputs = known(params)
    accepted = check(params, num_right, "coupled")
    assert all(num == min(num_right, num_drafts) for num, num_drafts in accepted), accepted
    for place in (6, 9, 11):
        check(replace(params, stop=(text_of(outputs[place : place + 2]),)), num_right, "coupled")


class Leaving(Collector):
    """A stream's events; its client leaves at one of them."""

    def __init__(self, place: int) -> None:
        super().__init__()
        self._place = place
        self.leave: Callable[[], None] = lambda: None

    def __call__(self, event: TokenEvent) -> None:
        super().__call__(event)
        if len(self.events) == self._place:
            self.leave()


@pytest.mark.parametrize("place", others_in_ci(4, 2, 3, *range(5, 12)))
@pytest.mark.parametrize("acceptance", RULES)
def test_a_cancel_in_a_round_ends_one_stream_and_frees_it(acceptance: AcceptanceName, place: int) -> None:
    """Tokens of the round may still come; the stream has one last event, and the other streams go on."""
    outputs = known(GREEDY)

    def make(slots: SlotTable, configured: Speculation | None) -> Told:
        return Told(slots, partial(right, outputs, MOST_DRAFTS))

    with harness(decoder=DECODER, acceptance=acceptance, speculator=make) as made:
        leaving = Leaving(place)
        stream_id = made.engine.submit(GenerationRequest(RequestId("left"), IDS, (), GREEDY), leaving)
        leaving.leave = partial(made.engine.cancel, stream_id)
        made.streams.append(leaving)
        _, other = made.submit(prompt(9), GREEDY)
        made.run()
        assert leaving.finish is FinishReason.CANCELLED
        assert leaving.token_ids == outputs[: len(leaving.token_ids)]
        assert place <= len(leaving.token_ids) <= place + MOST_DRAFTS
        assert other.token_ids == reference_ids(DECODER, prompt(9), GREEDY)
        assert is_empty(made.slots.ledger())


@pytest.mark.parametrize("speculation", ["streaming", "ngram"])
@pytest.mark.parametrize("seed", others_in_ci(*range(6)))
def test_texts_by_the_maximal_rule_end_where_they_say(speculation: SpeculationName, seed: int) -> None:
    """Their tokens are their own, so what holds for any text: length, stop string, and the model's logprobs."""
    params = replace(SAMPLED, seed=seed, max_tokens=30, stop=("e", "ab"), logprobs=0)
    ids = IDS * 2
    with harness(decoder=DECODER, speculation=speculation, acceptance="maximal") as made:
        ended = made.answer(ids, params)
    whole = text_of(ended.token_ids)
    stops = [place for stop in params.stop if (place := whole.find(stop)) >= 0]
    assert ended.text == whole[: min(stops, default=len(whole))]
    assert ended.finish is (FinishReason.STOP if stops else FinishReason.LENGTH)
    assert stops or len(ended.token_ids) == params.max_tokens
    assert not stops or len(whole) <= min(stops) + 2
    _, logits_TV = prefilled(DECODER, [*ids, *ended.token_ids])
    expected_TV = logits_TV.double().log_softmax(1)
    for at, event in enumerate(ended.events, start=len(ids) - 1):
        assert event.token is not None
        assert event.token.logprob == pytest.approx(float(expected_TV[at, event.token.token_id]), abs=1e-4)


@pytest.mark.parametrize("speculation", others_in_ci("streaming", "ngram", "auto"))
@pytest.mark.parametrize("policy", others_in_ci("device", "host"))
def test_a_text_is_the_same_however_drafts_come_and_go(policy: str, speculation: SpeculationName) -> None:
    """Each row has another number of drafts in each round, rounds without any in between; alone, and in a batch."""
    chance = random.Random(1)
    made_for: list[Curbed] = []

    def make(slots: SlotTable, configured: Speculation | None) -> Curbed:
        assert configured is not None
        made_for.append(Curbed(configured, lambda: chance.choice((0, 0, 1, 2, 3, 5, MOST_DRAFTS))))
        return made_for[-1]

    asked = [(prompt(7 + 5 * number) * 2, replace(SAMPLED, seed=number, max_tokens=40)) for number in range(6)]
    asked += [(prompt(5 + 7 * number) * 2, replace(GREEDY, max_tokens=40)) for number in range(2)]
    for part in (asked, asked[:1], asked[-1:]):
        with harness(
            decoder=DECODER,
            num_slots=8,
            policy=policy,
            speculation=speculation,
            draft_tokens=MOST_DRAFTS,
            speculator=make,
        ) as made:
            streams = [made.submit(ids, params)[1] for ids, params in part]
            made.run()
        for stream, (ids, params) in zip(streams, part, strict=True):
            assert stream.token_ids == reference_ids(DECODER, ids, params)
    assert {0, 1, 3, MOST_DRAFTS} <= set(made_for[0].num_drafts)
