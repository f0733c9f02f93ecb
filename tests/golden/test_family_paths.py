"""Models of every shape of layer, through chains and greedy generation, and what bf16 costs them on each way.

The references are one process's forward and transformers' own `generate`, on tiny random models.
"""

import math
from dataclasses import dataclass
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from baton.modeling.forward.decoder import Decoder
from baton.modeling.kv.buffers import BufferSpan
from baton.types import TokenRange
from tests.support.engines.chains import ChainGroup, assert_right, poisoned_buffer
from tests.support.models.tiny_models import load_tiny, tiny_decoder
from tests.support.paths import advance, advance_hidden, buffer_for, chunked_hidden, random_cuts

NAMES = (
    *("llama3_gqa_tied", "opt", "opt_350m", "opt_galactica", "falcon_7b", "falcon_40b", "falcon_rw_rotary"),
    *("phi4_mini", "gemma3", "qwen3_moe"),
)
"""One for each way to compose a layer."""
ROUNDED = [
    name if name in ("llama3_gqa_tied", "falcon_7b") else pytest.param(name, marks=pytest.mark.nightly)
    for name in NAMES
]
"""Rounding to bf16 has no branches by family: one with norms and gates, one without, on every change."""
NUM_TOKENS = 300
NUM_NEW = 24
TOLERANCE = 1e-4
NUM_TEXTS = 8
MAX_RATIO = 1.1


@dataclass(frozen=True)
class Model:
    """A tiny model of ours, transformers' of the same weights, and where both were loaded from."""

    name: str
    folder: Path
    decoder: Decoder
    reference: PreTrainedModel


@pytest.fixture(scope="module", params=NAMES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp(request.param)
    return Model(request.param, folder, *tiny_decoder(request.param, folder))


def text(decoder: Decoder, seed: int, num_tokens: int = NUM_TOKENS) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, decoder.config.vocab_size, (num_tokens,), generator=generator).tolist()


@pytest.mark.parametrize("cuts", [(0, 130, 300), (0, 7, 8, 211, 300), (0, 1, 299, 300)])
def test_a_chain_over_uneven_chunks_equals_one_process(model: Model, cuts: tuple[int, ...]) -> None:
    token_ids = text(model.decoder, seed=1)
    chunks = [TokenRange(start, end) for start, end in pairwise(cuts)]
    with ChainGroup(model.decoder, len(chunks), make_buffer=poisoned_buffer) as group:
        assert_right(group, group.submit(group.prepare(token_ids, chunks)))


def generated(reference: PreTrainedModel, prompts: list[list[int]]) -> tuple[list[list[int]], list[Tensor]]:
    """Output ids and logits `[NUM_NEW, V]` of each prompt by transformers' `generate`; prompts have one length."""
    generate: Any = reference.generate
    prompt_ids = torch.tensor(prompts)
    made = generate(
        prompt_ids,
        attention_mask=torch.ones_like(prompt_ids),
        max_new_tokens=NUM_NEW,
        do_sample=False,
        eos_token_id=None,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return made.sequences[:, prompt_ids.shape[1] :].tolist(), list(torch.stack(made.logits, dim=1))


@torch.inference_mode()
def test_greedy_tokens_equal_transformers_generate(model: Model) -> None:
    """Ours come from prefills, then from steps of all texts. No two best logits are so close that rounding chooses."""
    decoder, prompts = model.decoder, [text(model.decoder, seed, num_tokens=40) for seed in range(2, 2 + NUM_TEXTS)]
    outputs, logits = generated(model.reference, prompts)
    buffers = [buffer_for(decoder, len(prompt_ids) + NUM_NEW) for prompt_ids in prompts]
    firsts = [advance(decoder, buffer, ids, 0)[-1] for buffer, ids in zip(buffers, prompts, strict=True)]
    steps_RV = [torch.stack(firsts)]
    for at in range(len(prompts[0]), len(prompts[0]) + NUM_NEW - 1):
        spans = [BufferSpan(buffer, TokenRange(at, at + 1)) for buffer in buffers]
        steps_RV.append(decoder.logits(decoder.forward(steps_RV[-1].argmax(1).tolist(), spans)))
    expected_RTV, ours_RTV = torch.stack(logits), torch.stack(steps_RV, dim=1)
    best_RT2 = expected_RTV.topk(2).values
    assert (best_RT2[..., 0] - best_RT2[..., 1]).min() > TOLERANCE, "choose other texts"
    assert ours_RTV.argmax(2).tolist() == outputs
    torch.testing.assert_close(ours_RTV, expected_RTV, atol=TOLERANCE, rtol=0)
    assert len({token_id for output_ids in outputs for token_id in output_ids}) > 10, "repetitions would prove little"


def rms(error_TV: Tensor) -> float:
    return math.sqrt(float(error_TV.square().mean()))


def stepwise_hidden(decoder: Decoder, texts: list[list[int]], start: int) -> Tensor:
    """Hidden states `[texts * (NUM_TOKENS - start), D]`: each text prefilled to `start`, then all of them in a batch,
    one token a step."""
    buffers = [buffer_for(decoder, NUM_TOKENS) for _ in texts]
    for buffer, token_ids in zip(buffers, texts, strict=True):
        advance_hidden(decoder, buffer, token_ids[:start], 0)
    steps = [
        decoder.forward([ids[at] for ids in texts], [BufferSpan(each, TokenRange(at, at + 1)) for each in buffers])
        for at in range(start, NUM_TOKENS)
    ]
    return torch.stack(steps, dim=1).flatten(0, 1)


@pytest.mark.parametrize("model", ROUNDED, indirect=True)
@torch.inference_mode()
def test_bf16_in_chunks_and_steps_errs_no_more_than_bf16_at_once(model: Model) -> None:
    exact, rounded = model.decoder, load_tiny(model.name, model.folder, dtype="bfloat16")
    texts, start = [text(exact, seed) for seed in range(NUM_TEXTS)], 40
    assert NUM_TEXTS * (NUM_TOKENS - start) >= 2000

    def logits(decoder: Decoder, hidden: list[Tensor]) -> Tensor:
        return decoder.logits(torch.cat([hidden_TD[start:] for hidden_TD in hidden]))

    exact_TV = logits(exact, [advance_hidden(exact, buffer_for(exact, NUM_TOKENS), ids, 0) for ids in texts])
    whole_TV = logits(rounded, [advance_hidden(rounded, buffer_for(rounded, NUM_TOKENS), ids, 0) for ids in texts])
    chunks_TV = logits(
        rounded,
        [
            chunked_hidden(rounded, buffer_for(rounded, NUM_TOKENS), ids, random_cuts(NUM_TOKENS, 60, seed))
            for seed, ids in enumerate(texts)
        ],
    )
    steps_TV = rounded.logits(stepwise_hidden(rounded, texts, start))
    at_once, in_chunks, in_steps = (rms(each_TV - exact_TV) for each_TV in (whole_TV, chunks_TV, steps_TV))
    print(f"{model.name}: RMS logit error at once {at_once:.4f}, in chunks {in_chunks:.4f}, in steps {in_steps:.4f}")
    assert at_once > 0.003, "bf16 must differ from fp32, else nothing was compared"
    assert in_chunks <= MAX_RATIO * at_once
    assert in_steps <= MAX_RATIO * at_once


def test_kv_of_one_model_is_never_taken_for_anothers(tmp_path: Path) -> None:
    """Not even where all their sizes agree."""
    layouts = {name: load_tiny(name, tmp_path / name).layout for name in NAMES}
    for one, other in combinations(NAMES, 2):
        assert layouts[one].model_fingerprint != layouts[other].model_fingerprint
        assert layouts[one] != layouts[other]
