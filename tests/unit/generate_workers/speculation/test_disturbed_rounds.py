"""Rounds of drafts among everything that disturbs a batch: memory that runs out, cancels, choices, resumed streams."""

import dataclasses
from functools import cache, partial

import pytest

from baton.errors import ConfigError
from baton.sampling_params import SamplingParams
from baton.types import FinishReason
from tests.support.engines.draft_views import DECODER, VIEWS
from tests.support.engines.generation import harness, prompt, reference_ids
from tests.support.engines.infinigen import infinigen, prepared
from tests.support.engines.slot_tables import is_empty
from tests.support.kernels.paths import needs_rows
from tests.support.models.tiny_models import random_decoder
from tests.unit.generate_workers.engine.test_engine_memory import limit

LONG = SamplingParams(max_tokens=60, temperature=0.8, seed=5, ignore_eos=True)
SPECULATIONS = ("streaming", "ngram", "auto", "model")
COMPARATORS = ("quest", "topk")
CHOOSING = [
    pytest.param(name, marks=[needs_rows, pytest.mark.ci] if name in COMPARATORS else needs_rows) for name in VIEWS
]
ALL = pytest.mark.parametrize("speculation", [*SPECULATIONS, *CHOOSING])


@cache
def expected(length: int) -> list[int]:
    """The answer to `prompt(length)`, whatever drafts."""
    return reference_ids(DECODER, prompt(length), LONG)


def check_rows_that_outgrow_memory(policy: str, speculation: str) -> None:
    limits = limit(96, 2, DECODER.layout)
    with harness(decoder=DECODER, limits=limits, growth_tokens=1, speculation=speculation, policy=policy) as made:
        streams = [(made.submit(prompt(length), LONG)[1], length) for length in (30, 31, 32, 33)]
        made.run()
        for stream, length in streams:
            assert stream.token_ids == expected(length)
            assert stream.finish is FinishReason.LENGTH
        assert made.engine.status().num_preemptions > 0


@ALL
def test_rows_that_outgrow_memory_go_on_with_the_same_tokens(speculation: str) -> None:
    check_rows_that_outgrow_memory("device", speculation)


@pytest.mark.parametrize("speculation", SPECULATIONS)
def test_rows_that_outgrow_host_memory_go_on_with_the_same_tokens(speculation: str) -> None:
    check_rows_that_outgrow_memory("host", speculation)


@ALL
def test_a_cancel_between_rounds_frees_everything(speculation: str) -> None:
    with harness(decoder=DECODER, speculation=speculation) as made:
        stream_id, stream = made.submit(prompt(20), LONG)
        for _ in range(4):
            made.engine.step()
        made.engine.cancel(stream_id)
        made.engine.step()
        assert stream.finish is FinishReason.CANCELLED
        assert is_empty(made.slots.ledger())
        again = made.answer(prompt(20), LONG)
        assert again.token_ids[: len(stream.token_ids)] == stream.token_ids


@ALL
def test_choices_share_a_prompt_and_draft_for_themselves(speculation: str) -> None:
    params = dataclasses.replace(LONG, n=3, max_tokens=20)
    with harness(decoder=DECODER, speculation=speculation) as made:
        _, together = made.submit(prompt(1), params)
        made.run()
        for choice in range(3):
            alone = reference_ids(made.decoder, prompt(1), params.of_choice(choice))
            assert together.choice(choice).token_ids == alone


@ALL
def test_a_resumed_stream_goes_on_as_it_would_have(speculation: str) -> None:
    with harness(decoder=DECODER, speculation=speculation) as made:
        whole = made.answer(prompt(15), LONG).token_ids
        for num_known in (1, 17, 59):
            assert made.answer(prompt(15), LONG, whole[:num_known]).token_ids == whole[num_known:]


@ALL
def test_pushed_rows_are_drafted_for_from_their_first_token(speculation: str) -> None:
    with harness(decoder=DECODER, speculation=speculation) as made:
        lease = made.reserve(25, 25 + 60)
        made.push_and_commit(lease.ref, prompt(25), LONG)
        _, stream = made.submit(prompt(25), LONG, ref=lease.ref)
        made.run()
        assert stream.token_ids == expected(25)


def test_drafts_do_not_outlive_their_rows() -> None:
    with harness(speculation="auto") as made:
        for length in (9, 20, 31):
            made.answer(prompt(length), LONG)
        stats = made.engine.status().speculation
        assert stats is not None
        assert stats.num_drafted >= stats.num_accepted >= 0


@needs_rows
def test_approximate_targets_are_refused_by_name_and_plain_under_auto() -> None:
    make = partial(harness, decoder=DECODER, policy=infinigen(prepared(decoder=DECODER), DECODER))
    with pytest.raises(ConfigError, match="verifies with all KV"), make(speculation="streaming"):
        pass
    with make(speculation="auto") as made:
        assert made.engine.status().speculation is None


def test_models_with_sliding_windows_look_drafts_up() -> None:
    decoder = random_decoder(window=12)
    with pytest.raises(ConfigError, match="sliding windows"), harness(decoder=decoder, speculation="streaming"):
        pass
    with harness(decoder=decoder, speculation="auto") as made:
        assert made.answer(prompt(30), LONG).token_ids == reference_ids(decoder, prompt(30), LONG)
