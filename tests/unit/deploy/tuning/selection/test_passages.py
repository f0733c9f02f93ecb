"""The quality harness: of full attention it says the model's own likelihood, and what it counts is the formula's."""

import itertools
import math
import statistics
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from baton.modeling.forward.decoder import Decoder
from baton.modeling.forward.selection import Picks
from baton.modeling.kv.buffers import BufferSpan, KvBuffer, byte_view
from baton.types import SlotId, TokenRange
from baton_lab.quality.reading import perplexities
from deploy.tuning.selection.metrics import PicksMeter, compatibility, perplexity, relative_cost
from deploy.tuning.selection.passages import Context, Passage, PassageRows, Reading, prefill, read, shape_for
from generate_workers.residency.policies import make_residency
from generate_workers.residency.port import KvShape
from tests.support.models.tiny_models import random_decoder, tiny_decoder

NUM_STEPS = 12
CONTEXTS = (1, 40, 23)
WINDOW = 16


def passages(vocab_size: int = 97, num_steps: int = NUM_STEPS) -> list[Passage]:
    """Random tokens: rows of several lengths."""
    generator = torch.Generator().manual_seed(7)
    lengths = [context + num_steps + 1 for context in CONTEXTS]
    rows = [torch.randint(vocab_size, (length,), generator=generator).tolist() for length in lengths]
    return [Passage(tuple(ids), context) for ids, context in zip(rows, CONTEXTS, strict=True)]


def reading(decoder: Decoder, rows: Sequence[Passage], policy: str = "device") -> Reading:
    contexts = [Context(passage, prefill(decoder, passage.token_ids[: passage.num_context])) for passage in rows]
    residency = make_residency(policy, shape_for(decoder, rows), decoder.device)
    try:
        with PassageRows.opened(decoder, residency, contexts) as opened:
            return read(opened)
    finally:
        residency.close()


def losses_of(logits_SV: Tensor, passage: Passage) -> Tensor:
    """Of the tokens that a reading asks for, from logits at all positions."""
    scores_SV = logits_SV.double().log_softmax(-1)
    asked = range(passage.num_context, passage.num_context + passage.num_steps)
    return torch.stack([-scores_SV[at, passage.token_ids[at + 1]] for at in asked])


@pytest.mark.parametrize("window", [None, WINDOW])
def test_full_attention_s_losses_are_those_of_one_forward_over_everything(window: int | None) -> None:
    decoder = random_decoder(num_layers=3, window=window)
    got = reading(decoder, passages())
    for row, passage in enumerate(passages()):
        tokens = TokenRange(0, len(passage.token_ids))
        with torch.inference_mode():
            span = BufferSpan(KvBuffer(decoder.layout, tokens), tokens)
            logits_SV = decoder.logits(decoder.forward(passage.token_ids, [span]))
        asked = slice(passage.num_context, passage.num_context + NUM_STEPS)
        assert got.losses_BM[row].numpy() == pytest.approx(losses_of(logits_SV, passage).numpy(), abs=1e-4)
        assert got.choices_BM[row].tolist() == logits_SV[asked].argmax(-1).tolist()


def test_full_attention_s_perplexity_is_that_of_transformers(tmp_path: Path) -> None:
    decoder, reference = tiny_decoder("llama3_gqa_tied", tmp_path)
    rows = passages(vocab_size=256)
    expected = []
    with torch.inference_mode():
        for passage in rows:
            logits_SV = reference(torch.tensor([passage.token_ids])).logits[0]
            expected.append(losses_of(logits_SV, passage))
    assert perplexity(reading(decoder, rows).losses_BM) == pytest.approx(perplexity(torch.stack(expected)), rel=1e-5)


def test_a_context_is_prefilled_in_chunks_as_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = random_decoder()
    ids = passages()[1].token_ids
    whole = prefill(decoder, ids)
    monkeypatch.setattr("deploy.tuning.selection.passages._CHUNK_TOKENS", 16)
    heard: list[int] = []
    chunked = prefill(decoder, ids, heard.append)
    assert heard == [16, 16, 16, 5]
    assert chunked.data.numpy() == pytest.approx(whole.data.numpy(), abs=1e-5)


def test_rows_of_one_batch_read_as_they_do_alone() -> None:
    decoder = random_decoder()
    together = reading(decoder, passages())
    for row, passage in enumerate(passages()):
        assert reading(decoder, [passage]).losses_BM[0].numpy() == pytest.approx(
            together.losses_BM[row].numpy(), abs=1e-5
        )


def test_another_exact_policy_reads_the_same_and_its_bytes_are_the_formula_s() -> None:
    decoder = random_decoder(dtype="bfloat16", head_dim=64, num_layers=3)
    device, host = (reading(decoder, passages(), policy) for policy in ("device", "host"))
    assert torch.equal(device.losses_BM, host.losses_BM)
    assert torch.equal(device.choices_BM, host.choices_BM)
    keys = sum(context + step + 1 for context in CONTEXTS for step in range(NUM_STEPS))
    expected = keys * decoder.layout.token_bytes
    for each in (device, host):
        assert (each.num_kv_bytes, each.num_full_bytes) == (expected, expected)
        assert (each.picked_share, each.mass) == (None, None)
    assert (device.num_link_bytes, host.num_link_bytes) == (0, expected)
    assert host.held.home == device.held.home > host.held.device


def test_a_reading_can_be_repeated_to_the_last_bit() -> None:
    decoder = random_decoder(dtype="bfloat16", head_dim=64)
    first, second = reading(decoder, passages()), reading(decoder, passages())
    assert torch.equal(first.losses_BM, second.losses_BM)


def test_rows_are_given_back() -> None:
    decoder = random_decoder()
    [passage] = passages()[:1]
    residency = make_residency("device", shape_for(decoder, [passage]), decoder.device)
    context = Context(passage, prefill(decoder, passage.token_ids[:1]))
    for _ in range(2):  # a slot whose row was not released could not be opened again
        with PassageRows.opened(decoder, residency, [context]) as rows:
            assert rows.held.home > 0
            assert rows.num_steps_left == NUM_STEPS
            rows.step()
            assert rows.num_steps_left == NUM_STEPS - 1
        assert rows.held.home == 0
    residency.close()


def test_a_passage_without_a_step_is_refused() -> None:
    with pytest.raises(AssertionError, match="one step"):
        Passage((1, 2, 3), 2)


def test_what_is_picked_is_weighed_as_full_attention_weighs_it() -> None:
    """Beside naive loops in float64."""
    decoder = random_decoder()
    lengths, picked = (41, 24), [[[0, 3, 40], [7]], [[1, 2], [0, 4, 6]]]
    generator = torch.Generator().manual_seed(1)
    q_BNH = torch.randn(2, 4, 16, generator=generator)
    layers = [torch.randn(2, 41, 2, 2, 16, generator=generator) for _ in range(2)]  # rows, tokens, K and V, G, H
    residency = make_residency("device", KvShape(decoder.layout, (None, None), 2, 41), decoder.device)
    claims = [residency.open(SlotId(row), length, length) for row, length in enumerate(lengths)]
    for layer, data in enumerate(layers):
        for row, length in enumerate(lengths):
            claims[row].write(layer, TokenRange(0, length), byte_view(data[row, :length].contiguous())).result()
    keys_BGK = torch.full((2, 2, 3), -1, dtype=torch.int32)
    for row, head in itertools.product(range(2), range(2)):
        keys_BGK[row, head, : len(picked[row][head])] = torch.tensor(picked[row][head])
    picks = Picks(keys_BGK, torch.tensor([[3, 1], [2, 3]], dtype=torch.int32))
    meter = PicksMeter()
    meter.weighs = True
    with residency.step([(SlotId(row), TokenRange(length - 1, length)) for row, length in enumerate(lengths)]) as step:
        meter.take(1, picks, step, q_BNH)

    parts = []
    for row, head in itertools.product(range(2), range(4)):
        keys = layers[1][row, : lengths[row], 0, head // 2].double()
        weights = [math.exp(float(q_BNH[row, head].double() @ key) / 4) for key in keys]
        parts.append(sum(weights[at] for at in picked[row][head // 2]) / sum(weights))
    shares = [len(picked[row][head]) / lengths[row] for row in range(2) for head in range(2)]
    assert meter.mass == pytest.approx(statistics.fmean(parts), rel=1e-5)
    assert meter.picked_share == pytest.approx(statistics.fmean(shares), rel=1e-5)
    for claim in claims:
        claim.release()
    residency.close()


def test_metrics_are_what_their_names_say() -> None:
    reference_BM = torch.tensor([[1.0, 2.0, 3.0, 9.0], [1.0, 0.0, 1.0, 9.0]])
    gaps_B1 = torch.tensor([[0.1], [0.3]])
    assert perplexity(reference_BM[:, :1]) == pytest.approx(math.e)
    assert perplexities(reference_BM[:, :3], 2) == pytest.approx([math.e])
    assert perplexities(reference_BM, 2) == pytest.approx([math.e, math.exp(5.5)])
    cost, error = relative_cost(reference_BM + gaps_B1, reference_BM)
    assert cost == pytest.approx(math.exp(0.2) - 1, rel=1e-5)
    assert error == pytest.approx(math.exp(0.2) * 0.1, rel=1e-5)  # the gaps' deviation is .1414, over the root of two
    assert math.isnan(relative_cost(reference_BM[:1], reference_BM[:1])[1])
    assert compatibility(torch.tensor([[1, 2], [3, 4]]), torch.tensor([[1, 2], [3, 5]])) == 0.75
