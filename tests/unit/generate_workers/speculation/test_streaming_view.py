"""Drafts over the first and latest keys: what lies between is not read, and nothing of a draft stays behind."""

from collections.abc import Sequence

import pytest
import torch

from baton.modeling.forward.decoder import Decoder
from baton.modeling.kv.buffers import KvBuffer
from baton.sampling_params import SamplingParams
from baton.types import LeaseRef, RequestId, SlotId, TokenRange
from generate_workers.config import SpeculationName
from generate_workers.engine.rows import GenerationRequest, Row
from generate_workers.residency.port import DraftKeys, KvShape
from generate_workers.speculation.streaming_view import StreamingView
from tests.support.engines.generation import Collector, eos_decoder, harness, prefilled, prompt
from tests.support.engines.slot_tables import make_residency

FIRST, LAST = 3, 6


def draft_logits(decoder: Decoder, kv: KvBuffer, token_ids: Sequence[int], unread: float | None) -> torch.Tensor:
    """Logits of draft steps for the last tokens, of which the KV is not in place; keys left out hold `unread`."""
    num_cached = len(kv.tokens)
    shape = KvShape(decoder.layout, decoder.config.windows, 1, 64)
    residency = make_residency(shape)
    row = residency.open(SlotId(0), num_cached, 64)
    for layer in range(decoder.layout.num_layers):
        row.write(layer, kv.tokens, kv.export(layer, kv.tokens)).result()
    view, found = StreamingView(residency, DraftKeys(FIRST, LAST, 8)), []
    with torch.inference_mode():
        for index, token_id in enumerate(token_ids[num_cached:]):
            end = num_cached + index + 1
            if unread is not None:
                for layer in range(decoder.layout.num_layers):
                    left_out = torch.frombuffer(row.export(layer, TokenRange(FIRST, end - LAST)), dtype=torch.float32)
                    left_out.fill_(unread)
            with view.step([(SlotId(0), TokenRange(end - 1, end))]) as step:
                found.append(decoder.logits(decoder.forward([token_id], step.spans, step.turns)))
    residency.close()
    return torch.cat(found)


def test_keys_that_are_left_out_are_not_read() -> None:
    decoder, token_ids = eos_decoder(), prompt(40)
    kv, whole_TV = prefilled(decoder, token_ids[:34])
    as_they_are = draft_logits(decoder, kv, token_ids, None)
    assert torch.equal(draft_logits(decoder, kv, token_ids, float("nan")), as_they_are)
    _, whole_TV = prefilled(decoder, token_ids)
    assert not torch.allclose(as_they_are, whole_TV[34:], atol=1e-3)  # so it matters which keys are seen


def test_a_draft_step_that_sees_all_keys_is_a_plain_step() -> None:
    decoder, token_ids = eos_decoder(), prompt(FIRST + LAST)
    kv, _ = prefilled(decoder, token_ids[:4])
    _, whole_TV = prefilled(decoder, token_ids)
    torch.testing.assert_close(draft_logits(decoder, kv, token_ids, None), whole_TV[4:], atol=1e-4, rtol=1e-4)


class Keeper:
    """A hook that keeps ended rows' slots, and how much of them counts."""

    def __init__(self) -> None:
        self.kept: list[tuple[LeaseRef, int]] = []

    def take_row(self, row: Row) -> bool:
        self.kept.append((row.ref, row.num_cached))
        return True

    def stream_ended(self) -> None:
        """Nothing more comes."""


@pytest.mark.parametrize("speculation", ["streaming", "ngram", "auto"])
def test_kv_after_rounds_is_that_of_plain_steps(speculation: SpeculationName) -> None:
    """The KV of all tokens but the last, whatever was drafted behind them and given up."""
    found = []
    params = SamplingParams(max_tokens=30, temperature=0.9, seed=4, ignore_eos=True)
    for name in ("off", speculation):
        with harness(speculation=name, draft_tokens=4, draft_keys=FIRST + LAST) as made:
            keeper, events = Keeper(), Collector()
            made.engine.submit(GenerationRequest(RequestId("r"), prompt(12), (), params), events, keeper)
            made.streams.append(events)
            made.run()
            ((ref, num_cached),) = keeper.kept
            reader = made.slots.open_read(ref)
            layers = range(made.decoder.layout.num_layers)
            kv = [bytes(reader.export(layer, TokenRange(0, num_cached))) for layer in layers]
            found.append((num_cached, torch.frombuffer(bytearray(b"".join(kv)), dtype=torch.float32)))
            reader.close()
            made.slots.release(ref)
    (plain_cached, plain), (num_cached, drafted) = found
    assert num_cached == plain_cached == 12 + 30 - 1
    torch.testing.assert_close(drafted, plain, atol=1e-5, rtol=1e-5)
