"""The sample model against transformers, in fp32 on natural text; and what bf16 costs on the ways through the decoder.

Equal tokens, by the rule: a token may differ only where the reference's two best logits are within 1e-3 of each other;
every such place is printed, and more than 1 in 1,000 fails. The reference sees each prompt with our own tokens behind
it, all at once: it makes the same decision after the same tokens, position by position, so that equality at every
position is equality of greedy texts, and behind a place that differs the comparison goes on.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from baton.types import TokenRange
from modeling.checkpoints.weights import load_decoder
from modeling.forward.decoder import Decoder
from modeling.kv.buffers import BufferSpan
from tests.support.models.texts import passage_ids
from tests.support.paths import advance_hidden, buffer_for, chunked_hidden, in_single_steps, random_cuts, rms_error
from text.tokenizer import Tokenizer

NUM_NEW = 64
PLAIN_LENGTHS = {"short": (10, 90, 333, 700), "long": (3000,)}
CHAT_LENGTHS = {"short": (15, 60, 250, 500), "long": (1200,)}
NEAR_TIE = 1e-3
NUM_SCORED = 2048
MAX_RATIO = 1.1
from_pretrained: Callable[..., PreTrainedModel] = AutoModelForCausalLM.from_pretrained


@dataclass(frozen=True)
class Generated:
    """A prompt, our greedy continuation, and our logits where each token of it was chosen."""

    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    logits_TV: Tensor


@pytest.fixture(scope="module")
def decoder(smollm2: Path) -> Decoder:
    return load_decoder(smollm2)


@pytest.fixture(scope="module")
def reference(smollm2: Path) -> PreTrainedModel:
    return from_pretrained(smollm2, dtype=torch.float32, attn_implementation="sdpa")


@pytest.fixture(scope="module", params=["short", pytest.param("long", marks=pytest.mark.ci)])
def prompts(request: pytest.FixtureRequest, smollm2: Path) -> list[tuple[int, ...]]:
    """Passages of a novel, half of them as a chat's message."""
    tokenizer = Tokenizer.load(smollm2)
    plain = [passage_ids(smollm2, length, 700 * place) for place, length in enumerate(PLAIN_LENGTHS[request.param])]
    chats = []
    for place, length in enumerate(CHAT_LENGTHS[request.param]):
        content = "What happens here? " + tokenizer.decode(passage_ids(smollm2, length, 5000 + 700 * place))
        chats.append(tuple(tokenizer.encode_chat([{"role": "user", "content": content}])))
    return plain + chats


@pytest.fixture(scope="module")
def generated(decoder: Decoder, prompts: list[tuple[int, ...]]) -> list[Generated]:
    """All prompts prefilled in chunks of 512, then generated together, one ragged batch a step."""
    with torch.inference_mode():
        return _generate(decoder, prompts)


def _generate(decoder: Decoder, prompts: Sequence[tuple[int, ...]]) -> list[Generated]:
    buffers = [buffer_for(decoder, len(prompt_ids) + NUM_NEW) for prompt_ids in prompts]
    last = [
        chunked_hidden(decoder, buffer, prompt_ids, range(512, len(prompt_ids), 512))[-1]
        for buffer, prompt_ids in zip(buffers, prompts, strict=True)
    ]
    steps_RV = [decoder.logits(torch.stack(last))]
    for step in range(NUM_NEW - 1):
        spans = [
            BufferSpan(buffer, TokenRange(len(prompt_ids) + step, len(prompt_ids) + step + 1))
            for buffer, prompt_ids in zip(buffers, prompts, strict=True)
        ]
        steps_RV.append(decoder.logits(decoder.forward(steps_RV[-1].argmax(1).tolist(), spans)))
    logits_RTV = torch.stack(steps_RV, dim=1)
    return [
        Generated(prompt_ids, tuple(logits_TV.argmax(1).tolist()), logits_TV)
        for prompt_ids, logits_TV in zip(prompts, logits_RTV, strict=True)
    ]


def reference_logits(reference: PreTrainedModel, row: Generated) -> Tensor:
    """Transformers' logits `[NUM_NEW, V]` after the prompt and each of our tokens but the last."""
    token_ids = torch.tensor([row.prompt_ids + row.output_ids[:-1]])
    logits_TV: Tensor = reference(token_ids, use_cache=False, logits_to_keep=NUM_NEW).logits[0]
    return logits_TV


@torch.inference_mode()
def test_greedy_tokens_equal_transformers(generated: list[Generated], reference: PreTrainedModel) -> None:
    num_differing = 0
    for row in generated:
        expected_TV = reference_logits(reference, row)
        best_T2 = expected_TV.topk(2)
        gaps_T = best_T2.values[:, 0] - best_T2.values[:, 1]
        differs_T = torch.tensor(row.output_ids) != best_T2.indices[:, 0]
        for place in differs_T.nonzero().flatten().tolist():
            num_differing += 1
            print(f"prompt of {len(row.prompt_ids)}, token {place}: the reference's gap is {gaps_T[place]:.1e}")
            assert gaps_T[place] < NEAR_TIE
        torch.testing.assert_close(row.logits_TV, expected_TV, atol=NEAR_TIE, rtol=0)
    assert num_differing * 1000 <= NUM_NEW * len(generated)


@torch.inference_mode()
def test_kv_of_chunks_equals_kv_of_the_whole(decoder: Decoder, smollm2: Path) -> None:
    token_ids = passage_ids(smollm2, 700)
    chunks, at_once = buffer_for(decoder, 700), buffer_for(decoder, 700)
    chunked_hidden(decoder, chunks, token_ids, random_cuts(700, 200, seed=0))
    advance_hidden(decoder, at_once, token_ids, 0)
    for got, expected in zip(chunks.data, at_once.data, strict=True):
        torch.testing.assert_close(got, expected, atol=1e-5 * float(expected.abs().max()), rtol=0)


@pytest.mark.ci
@torch.inference_mode()
def test_bf16_in_chunks_or_steps_errs_no_more_than_bf16_at_once(decoder: Decoder, smollm2: Path) -> None:
    token_ids = passage_ids(smollm2, NUM_SCORED)
    exact_TD = advance_hidden(decoder, buffer_for(decoder, NUM_SCORED), token_ids, 0)
    rounded = load_decoder(smollm2, dtype="bfloat16")
    whole_TD = advance_hidden(rounded, buffer_for(rounded, NUM_SCORED), token_ids, 0)
    at_once = rms_error(rounded, whole_TD, decoder, exact_TD)
    for max_chunk, seed in ((1000, 0), (120, 1)):
        cuts = random_cuts(NUM_SCORED, max_chunk, seed)
        chunks_TD = chunked_hidden(rounded, buffer_for(rounded, NUM_SCORED), token_ids, cuts)
        in_chunks = rms_error(rounded, chunks_TD, decoder, exact_TD)
        print(f"RMS logit error against fp32: at once {at_once:.4f}, in {len(cuts) + 1} chunks {in_chunks:.4f}")
        assert in_chunks <= MAX_RATIO * at_once
    in_steps = rms_error(rounded, in_single_steps(rounded, token_ids), decoder, exact_TD)
    print(f"in steps of one token {in_steps:.4f}")
    assert in_steps <= MAX_RATIO * at_once
    assert at_once > 0.01, "bf16 must differ from fp32, else nothing was compared"
