"""Every family and switch that we load gives transformers' logits, on every way through the decoder."""

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from baton.modeling.forward.decoder import Decoder
from baton.modeling.kv.buffers import BufferSpan, KvBuffer
from baton.types import TokenRange
from tests.support.models.tiny_models import TINY_NAMES, WINDOW, tiny_decoder
from tests.support.paths import advance, buffer_for, chunked_hidden, random_cuts, whole

NUM_TOKENS = 200
"""More than 20 windows, and more than the original context of the scaled RoPEs."""
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Family:
    """A tiny model of ours, a text, and transformers' logits on it."""

    decoder: Decoder
    token_ids: list[int]
    expected_TV: Tensor


@pytest.fixture(scope="module", params=TINY_NAMES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    decoder, reference = tiny_decoder(request.param, tmp_path_factory.mktemp(request.param))
    generator = torch.Generator().manual_seed(7)
    token_ids = torch.randint(0, decoder.config.vocab_size, (NUM_TOKENS,), generator=generator)
    with torch.inference_mode():
        expected_TV = reference(token_ids.unsqueeze(0)).logits[0]
    assert expected_TV.std() > 1, "flat logits would prove nothing"
    return Family(decoder, token_ids.tolist(), expected_TV)


def check(logits_TV: Tensor, expected_TV: Tensor) -> None:
    assert logits_TV.dtype == torch.float32
    torch.testing.assert_close(logits_TV, expected_TV, atol=TOLERANCE, rtol=0)


@torch.inference_mode()
def test_whole_prefill(family: Family) -> None:
    check(whole(family.decoder, family.token_ids), family.expected_TV)


@torch.inference_mode()
def test_steps_of_one_token(family: Family) -> None:
    buffer = buffer_for(family.decoder, NUM_TOKENS)
    advance(family.decoder, buffer, family.token_ids[:150], 0)
    steps = [advance(family.decoder, buffer, [family.token_ids[at]], at) for at in range(150, NUM_TOKENS)]
    check(torch.cat(steps), family.expected_TV[150:])


@torch.inference_mode()
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in (1, 2))])
def test_random_chunks(family: Family, seed: int) -> None:
    buffer = buffer_for(family.decoder, NUM_TOKENS)
    hidden_TD = chunked_hidden(family.decoder, buffer, family.token_ids, random_cuts(NUM_TOKENS, 60, seed))
    check(family.decoder.logits(hidden_TD), family.expected_TV)


@torch.inference_mode()
def test_chunks_leave_the_kv_of_the_whole(family: Family) -> None:
    chunks, at_once = buffer_for(family.decoder, NUM_TOKENS), buffer_for(family.decoder, NUM_TOKENS)
    chunked_hidden(family.decoder, chunks, family.token_ids, random_cuts(NUM_TOKENS, 60, seed=3))
    advance(family.decoder, at_once, family.token_ids, 0)
    for got, expected in zip(chunks.data, at_once.data, strict=True):
        torch.testing.assert_close(got, expected, atol=1e-5 * float(expected.abs().max()), rtol=0)


@torch.inference_mode()
def test_verifying_several_tokens_and_then_others_in_their_place(family: Family) -> None:
    buffer = buffer_for(family.decoder, NUM_TOKENS)
    advance(family.decoder, buffer, family.token_ids[:100], 0)
    drafts = [*family.token_ids[100:103], *(token_id ^ 1 for token_id in family.token_ids[103:108])]
    logits_TV = advance(family.decoder, buffer, drafts, 100)
    check(logits_TV[:3], family.expected_TV[100:103])
    assert (logits_TV[3:] - family.expected_TV[103:108]).abs().max() > 0.1, "wrong drafts must show"
    check(advance(family.decoder, buffer, family.token_ids[103:109], 103), family.expected_TV[103:109])


@torch.inference_mode()
def test_ragged_batch_of_steps_chunks_and_whole_prompts(family: Family) -> None:
    new_tokens = [TokenRange(33, 34), TokenRange(20, 61), TokenRange(0, 47), TokenRange(150, 151), TokenRange(96, 101)]
    spans, token_ids = [], []
    for tokens in new_tokens:
        buffer = buffer_for(family.decoder, tokens.end + 9)
        if tokens.start:
            advance(family.decoder, buffer, family.token_ids[: tokens.start], 0)
        spans.append(BufferSpan(buffer, tokens))
        token_ids += family.token_ids[tokens.start : tokens.end]
    logits_TV = family.decoder.logits(family.decoder.forward(token_ids, spans))
    check(logits_TV, torch.cat([family.expected_TV[tokens.start : tokens.end] for tokens in new_tokens]))


@torch.inference_mode()
def test_windows_change_the_answer(family: Family) -> None:
    """If the windows did not bite on these texts, the tests above would not show that they are right."""
    if not any(family.decoder.config.windows):
        pytest.skip("family has no sliding window")
    token_ids = list(family.token_ids)
    token_ids[0] ^= 1
    num_blind = 1 + len(family.decoder.config.windows) * (WINDOW - 1)
    changed = (whole(family.decoder, token_ids) - family.expected_TV).abs().amax(1)
    assert changed[0] > 0.1
    if all(family.decoder.config.windows):
        assert changed[num_blind:].max() < TOLERANCE


def forward_with_sdpa(decoder: Decoder, buffer: KvBuffer, token_ids: list[int], start: int, top_left: bool) -> Tensor:
    """A chunk's logits with torch's SDPA over the rectangle of its queries and all keys so far, its mask from the
    top-left corner (`is_causal=True`) or by position."""
    tokens = TokenRange(start, start + len(token_ids))
    step = decoder.begin([BufferSpan(buffer, tokens)])
    hidden_TD = decoder.embed(token_ids, step)
    mask_TS = torch.ones(len(tokens), tokens.end, dtype=torch.bool).tril(start)
    for layer in range(decoder.config.num_layers):
        q_TNH = decoder.project(layer, hidden_TD, step)
        rows = buffer.rows(layer, TokenRange(0, tokens.end))
        q_BNTH, k_BGSH, v_BGSH = (x.transpose(0, 1).unsqueeze(0) for x in (q_TNH, rows.k_SGH, rows.v_SGH))
        mask = None if top_left else mask_TS
        o_BNTH = F.scaled_dot_product_attention(q_BNTH, k_BGSH, v_BGSH, mask, is_causal=top_left, enable_gqa=True)
        hidden_TD = decoder.complete(layer, hidden_TD, o_BNTH[0].transpose(0, 1))
    return decoder.logits(hidden_TD)


@torch.inference_mode()
def test_top_left_causal_mask_on_a_chunk_would_be_found(family: Family) -> None:
    """torch's `is_causal=True` on a chunk's rectangle is wrong by far more than our tolerance; the same code with the
    mask by position is inside it, and so is our decoder."""
    if any(family.decoder.config.windows):
        pytest.skip("the comparison knows no windows")
    buffer, chunk = buffer_for(family.decoder, NUM_TOKENS), family.token_ids[80:120]
    advance(family.decoder, buffer, family.token_ids[:80], 0)
    expected_TV = family.expected_TV[80:120]
    check(advance(family.decoder, buffer, chunk, 80), expected_TV)
    check(forward_with_sdpa(family.decoder, buffer, chunk, 80, top_left=False), expected_TV)
    wrong_TV = forward_with_sdpa(family.decoder, buffer, chunk, 80, top_left=True)
    assert (wrong_TV - expected_TV).abs().max() > 1000 * TOLERANCE
