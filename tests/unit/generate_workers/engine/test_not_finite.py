"""A sequence whose logits are NaN ends with an error, is counted and leaves nothing; the others get their tokens."""

import math
from dataclasses import replace
from typing import Any

import pytest

from baton.modeling.forward.decoder import Decoder
from baton.modeling.kernels import native
from baton.sampling_params import SamplingParams
from baton.types import FinishReason, RequestId, SampledToken
from generate_workers.engine.rows import GenerationRequest, Row
from tests.support.engines.devices import device_for_tests
from tests.support.engines.generation import (
    Collector,
    Harness,
    eos_decoder,
    harness,
    prefilled,
    prompt,
    reference_ids,
)
from tests.support.engines.slot_tables import is_empty, push_buffer
from tests.support.models.damaged import DAMAGED, DamagedDecoder

GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)
DRAWN = SamplingParams(max_tokens=12, temperature=0.8, seed=3, ignore_eos=True)
"""Neither brings the damaged token, behind the prompts here."""
FIRST = SampledToken(7)


class Saver:
    """A hook that counts the rows whose KV it might keep."""

    num_rows = 0

    def take_row(self, row: Row) -> bool:
        self.num_rows += 1
        return False

    def stream_ended(self) -> None:
        pass


def damaged(device: str = "cpu") -> Decoder:
    sound = eos_decoder()
    return DamagedDecoder(sound.config, sound.weights, device=device_for_tests(device))


def check(made: Harness, broken: SamplingParams) -> None:
    """A sequence with the damaged token among two others."""
    sound = [made.submit(prompt(9), GREEDY)[1]]
    saver, ended = Saver(), Collector(num_choices=broken.n)
    request = GenerationRequest(RequestId("broken"), (*prompt(20), DAMAGED, 5), (), broken)
    made.engine.submit(request, ended, saver)
    sound.append(made.submit(prompt(12), DRAWN)[1])
    made.run(*sound, ended)
    ended.check()
    assert (ended.finish, ended.token_ids) == (FinishReason.ERROR, [])
    assert ended.error == "NotFiniteError: the logits behind 22 tokens are not finite: is the model damaged?"
    assert not saver.num_rows, "its KV may be kept"
    assert sound[0].token_ids == reference_ids(eos_decoder(), prompt(9), GREEDY)
    assert sound[1].token_ids == reference_ids(eos_decoder(), prompt(12), DRAWN)
    status = made.engine.status()
    assert status.num_not_finite == 1
    assert is_empty(status.ledger)


@pytest.mark.parametrize("broken", [GREEDY, DRAWN, replace(DRAWN, n=2), replace(GREEDY, logprobs=3)])
@pytest.mark.parametrize("device", ["cpu", "emulated", "tensors"])
def test_damaged_weight_ends_its_sequence_alone(device: str, broken: SamplingParams) -> None:
    with harness(decoder=damaged(device)) as made:
        check(made, broken)


@pytest.mark.parametrize("broken", [GREEDY, DRAWN])
def test_it_does_so_without_native_kernels(broken: SamplingParams, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "load", lambda *_: False)
    with harness(decoder=damaged()) as made:
        check(made, broken)


@pytest.mark.parametrize("acceptance", ["coupled", "maximal"])
@pytest.mark.parametrize("speculation", ["streaming", "ngram", "model"])
def test_it_does_so_where_drafts_are_verified(speculation: Any, acceptance: Any) -> None:
    with harness(decoder=damaged(), speculation=speculation, acceptance=acceptance) as made:
        broken = made.submit((*prompt(20), DAMAGED, 5), GREEDY)[1]
        sound = made.submit(prompt(9), GREEDY)[1]
        made.run()
        assert (broken.finish, broken.token_ids) == (FinishReason.ERROR, [])
        assert sound.token_ids == reference_ids(eos_decoder(), prompt(9), GREEDY)
        assert made.engine.status().num_not_finite == 1


@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_damaged_kv_that_was_pushed_ends_its_sequence_alone(device: str) -> None:
    with harness(decoder=damaged(device)) as made:
        sound = made.submit(prompt(9), DRAWN)[1]
        lease = made.reserve(20, 40)
        broken = made.submit(prompt(20), DRAWN, ref=lease.ref)[1]
        buffer, _ = prefilled(made.decoder, prompt(20))
        buffer.data[1, 3] = math.nan
        push_buffer(made.slots, lease.ref, buffer, buffer.tokens)
        made.commit(lease.ref, FIRST)
        made.run()
        assert broken.finish is FinishReason.ERROR and broken.error.startswith("NotFiniteError")
        assert broken.token_ids == [FIRST.token_id]
        assert sound.token_ids == reference_ids(eos_decoder(), prompt(9), DRAWN)


@pytest.mark.parametrize("chunk", [4, 64])
def test_prompt_without_finite_scores_ends_its_sequence_alone(chunk: int) -> None:
    params = replace(GREEDY, prompt_logprobs=1)
    with harness(decoder=damaged(), max_batched_tokens=chunk) as made:
        broken = made.submit((*prompt(8), DAMAGED, *prompt(8)), params)[1]
        sound = made.submit(prompt(9), params)[1]
        made.run()
        assert broken.finish is FinishReason.ERROR and "not finite" in broken.error
        assert sound.token_ids == reference_ids(eos_decoder(), prompt(9), GREEDY)
        assert all(math.isfinite(token.logprob) for token in sound.events[0].prompt[1:] if token.logprob is not None)
        assert made.engine.status().num_not_finite == 1
