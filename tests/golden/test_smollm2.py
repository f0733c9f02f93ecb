"""The sample model against transformers, in fp32 on natural text; and what bf16 costs on the ways through the decoder.

Equal tokens, by the rule: a token may differ only where the reference's two best logits are within 1e-3 of each other;
every such place is printed, and more than 1 in 1,000 fails. We are given the tokens of the reference, so that equality
at every position is equality of greedy texts, and behind a place that differs the comparison goes on. Its
tokens and best logits are in a file, which the nightly run compares with transformers.
"""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from baton.modeling.checkpoints.weights import load_decoder
from baton.modeling.forward.decoder import Decoder
from baton.modeling.kv.buffers import BufferSpan
from baton.types import TokenRange
from tests.support.models import smollm2_reference
from tests.support.models.smollm2_reference import NUM_NEW, Reference
from tests.support.models.texts import passage_ids
from tests.support.paths import advance_hidden, buffer_for, chunked_hidden, in_single_steps, random_cuts, rms_error

MOST_TOKENS_SHORT = 1000
NEAR_TIE = 1e-3
NUM_SCORED = 2048
MAX_RATIO = 1.1


@pytest.fixture(scope="module")
def decoder(smollm2: Path) -> Decoder:
    return load_decoder(smollm2)


@pytest.fixture(scope="module", params=["short", pytest.param("long", marks=pytest.mark.nightly)])
def references(request: pytest.FixtureRequest, smollm2: Path) -> list[Reference]:
    is_short = request.param == "short"
    made = smollm2_reference.load(smollm2)
    return [each for each in made if (len(each.prompt_ids) < MOST_TOKENS_SHORT) is is_short]


def logits_after(decoder: Decoder, references: Sequence[Reference]) -> Tensor:
    """Our logits `[R, NUM_NEW, V]` where the tokens of the reference are chosen: all prompts prefilled in chunks of
    512, then continued together, one ragged batch a step."""
    buffers = [buffer_for(decoder, len(each.prompt_ids) + NUM_NEW) for each in references]
    last = [
        chunked_hidden(decoder, buffer, each.prompt_ids, range(512, len(each.prompt_ids), 512))[-1]
        for buffer, each in zip(buffers, references, strict=True)
    ]
    steps_RV = [decoder.logits(torch.stack(last))]
    for step in range(NUM_NEW - 1):
        spans = [
            BufferSpan(buffer, TokenRange(len(each.prompt_ids) + step, len(each.prompt_ids) + step + 1))
            for buffer, each in zip(buffers, references, strict=True)
        ]
        given = [each.output_ids[step] for each in references]
        steps_RV.append(decoder.logits(decoder.forward(given, spans)))
    return torch.stack(steps_RV, dim=1)


@torch.inference_mode()
def test_greedy_tokens_equal_transformers(decoder: Decoder, references: list[Reference]) -> None:
    num_differing = 0
    for each, logits_TV in zip(references, logits_after(decoder, references), strict=True):
        differs_T = logits_TV.argmax(1) != each.best_TK[:, 0]
        for place in differs_T.nonzero().flatten().tolist():
            num_differing += 1
            print(f"prompt of {len(each.prompt_ids)}, token {place}: the reference's gap is {each.gaps_T[place]:.1e}")
            assert each.gaps_T[place] < NEAR_TIE
        best_TK = logits_TV.gather(1, each.best_TK.long())
        torch.testing.assert_close(best_TK, each.logits_TK, atol=NEAR_TIE, rtol=0)
        torch.testing.assert_close(logits_TV.logsumexp(1), each.sums_T, atol=NEAR_TIE, rtol=0)
    assert num_differing * 1000 <= NUM_NEW * len(references)


@pytest.mark.nightly
@torch.inference_mode()
def test_the_file_says_what_transformers_says(decoder: Decoder, references: list[Reference], smollm2: Path) -> None:
    """The texts are transformers' own, and all our logits are near its."""
    model = smollm2_reference.transformers_model(smollm2)
    for each, logits_TV in zip(references, logits_after(decoder, references), strict=True):
        made = smollm2_reference.make(model, each.prompt_ids)
        assert made.output_ids == each.output_ids
        torch.testing.assert_close(made.logits_TK, each.logits_TK, atol=NEAR_TIE, rtol=0)
        expected_TV = smollm2_reference.decisions(model, each.prompt_ids, each.output_ids)
        torch.testing.assert_close(logits_TV, expected_TV, atol=NEAR_TIE, rtol=0)


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
