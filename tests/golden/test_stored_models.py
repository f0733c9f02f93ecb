"""Whole models whose weights are kept as they are stored. Prompts, chains, and steps of many tokens compute, bit by
bit, what the same models compute with weights in bf16, where products have operands in bf16. Steps of few tokens use
exact weights, and are as close to fp32."""

import random
import shutil
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from baton.modeling.checkpoints.catalog import resolve_model
from baton.modeling.checkpoints.gguf import convert_gguf
from baton.modeling.checkpoints.weights import load_decoder
from baton.modeling.forward.decoder import Decoder
from baton.modeling.forward.linear import PanelLinear, has_panel_linear
from baton.modeling.forward.weight_sizes import bytes_per_step
from baton.modeling.kernels.process_kernels import KERNELS
from baton.modeling.kernels.processor import processor_kind
from baton.modeling.kernels.products import DOT, TILES, WIDENED
from baton.modeling.kv.buffers import BufferSpan
from baton.sampling_params import SamplingParams
from baton.text.gguf_tokenizer import write_tokenizer
from baton.types import KernelChoice, TokenRange
from tests.conftest import MODEL_CACHE
from tests.support.engines.chains import ChainGroup, reference
from tests.support.engines.generation import harness
from tests.support.engines.infinigen import ALL, infinigen, prepared
from tests.support.kernels.paths import has_tiles
from tests.support.models.first_layers import write_first_layers
from tests.support.models.gguf_blocks import random_blocks
from tests.support.models.quantised_folders import write_pair
from tests.support.models.texts import passage_ids
from tests.support.models.tiny_gguf import tiny_keys, write_gguf
from tests.support.paths import buffer_for

PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)
MIXED = {
    "attn_v": "Q6_K",
    "ffn_down": "Q6_K",
    "attn_q": "Q4_K",
    "attn_k": "Q4_K",
    "ffn_gate": "Q4_K",
    "ffn_up": "Q4_K",
} | {"attn_output": "Q4_K"}
"""Types of tensors as in files of the mix Q4_K_M: parts of one linear layer have different types."""
UNIFORM = {type_name: dict.fromkeys(MIXED, type_name) for type_name in ("Q4_0", "Q4_1", "Q8_0")}

pytestmark = pytest.mark.skipif(not has_panel_linear(), reason="needs linear layers of our own")


WAYS = [DOT, pytest.param(TILES, marks=pytest.mark.skipif(not has_tiles(), reason="needs AMX"))]


@pytest.fixture(scope="module", params=WAYS)
def kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    """All linear layers multiply in panels: torch's results for many tokens would differ in bits."""
    with pytest.MonkeyPatch.context() as patch:
        attention = TILES if request.param == TILES else WIDENED
        patch.setattr(KERNELS, "_choice", KernelChoice(processor_kind(), attention, request.param, None))
        yield


@pytest.fixture(scope="module")
def folders(short_smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    """Folders with the sample model's first layers: with weights as stored, and in bf16."""
    whole = resolve_model("smollm2-135m", cache=MODEL_CACHE, progress=lambda done, total: None, finish=write_tokenizer)
    stored = tmp_path_factory.mktemp("models") / "stored"
    yield write_first_layers(whole, stored), short_smollm2
    shutil.rmtree(stored)


@pytest.fixture(scope="module")
def samples(kernels: None, folders: tuple[Path, Path]) -> tuple[Decoder, Decoder]:
    """The sample model with its weights as stored, and in bf16."""
    stored, plain = (load_decoder(folder, dtype="bfloat16") for folder in folders)
    return stored, plain


def check_same(stored: Decoder, plain: Decoder, token_ids: Sequence[int]) -> None:
    """The KV of a prompt is the same, and so are the logits of steps of more tokens than are multiplied by codes."""
    for each in stored.weights.layers:
        assert isinstance(each.qkv, PanelLinear) and each.qkv.num_bytes < 0.75 * plain.weights.layers[0].qkv.num_bytes
    assert torch.equal(reference(stored, token_ids)[0], reference(plain, token_ids)[0])
    for num_new in (5, 10, 50) if KERNELS.choice.panels == TILES else (50,):
        assert torch.equal(steps(stored, token_ids[:100], num_new), steps(plain, token_ids[:100], num_new))


@torch.inference_mode()
def steps(decoder: Decoder, token_ids: Sequence[int], num_new: int) -> Tensor:
    """Return logits of all tokens, computed in steps of `num_new` tokens."""
    buffer, parts = buffer_for(decoder, len(token_ids)), []
    for tokens in TokenRange(0, len(token_ids)).split(num_new):
        hidden_TD = decoder.forward(token_ids[tokens.start : tokens.end], [BufferSpan(buffer, tokens)], most_queries=9)
        parts.append(decoder.logits(hidden_TD))
    return torch.cat(parts)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    "name", ["awq_groups_of_32", "gptq_groups_of_32", "packed_int4", "packed_int8", "int8_channel"]
)
def test_checkpoints_of_integers(name: str, tmp_path: Path) -> None:
    pair = write_pair(tmp_path, name)
    stored, plain = (load_decoder(pair.quantised, dtype="bfloat16", weights=each) for each in ("stored", "bfloat16"))
    assert stored.weights.fingerprint == plain.weights.fingerprint, "KV may be shared"
    check_same(stored, plain, tokens_for(plain))


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("name", ["mixed", *UNIFORM])
def test_gguf_files(name: str, tmp_path: Path) -> None:
    """K-quants need rows of 256 inputs, so the tiny model is made wider."""
    write_wide_gguf(tmp_path / "wide.gguf", MIXED if name == "mixed" else UNIFORM[name])
    convert_gguf(tmp_path / "wide.gguf", tmp_path, lambda done, total: None)
    stored, plain = (load_decoder(tmp_path, dtype="bfloat16", weights=each) for each in ("stored", "bfloat16"))
    check_same(stored, plain, tokens_for(plain))


def tokens_for(decoder: Decoder) -> list[int]:
    return random.Random(0).choices(range(decoder.config.vocab_size), k=100)


def write_wide_gguf(path: Path, types: dict[str, str]) -> None:
    """A tiny Llama with 256 hidden values, heads of 64, and random blocks of these types."""
    sizes = {
        "embedding_length": 256,
        "feed_forward_length": 512,
        "attention.key_length": 64,
        "attention.value_length": 64,
    }
    keys = tiny_keys("llama") | {f"llama.{name}": size for name, size in sizes.items()}
    shapes = {"attn_q": (256, 256), "attn_k": (128, 256), "attn_v": (128, 256), "attn_output": (256, 256)}
    shapes |= {"ffn_gate": (512, 256), "ffn_up": (512, 256), "ffn_down": (256, 512)}
    kinds = {f"blk.{layer}.{name}.weight": GGMLQuantizationType[types[name]] for layer in range(2) for name in shapes}
    tensors = {
        f"blk.{layer}.{name}.weight": np.ones(256, np.float32)
        for layer in range(2)
        for name in ("attn_norm", "ffn_norm")
    }
    tensors["output_norm.weight"] = np.ones(256, np.float32)
    tensors["token_embd.weight"] = np.random.default_rng(0).standard_normal((128, 256)).astype(np.float32)
    blocks = {
        name: random_blocks(kind.name, *shapes[name.split(".")[-2]], seed, size=0.06).numpy()
        for seed, (name, kind) in enumerate(kinds.items())
    }
    embedding = {"token_embd.weight": GGMLQuantizationType.Q8_0}
    write_gguf(path, "llama", keys, {**tensors, **blocks}, {**kinds, **embedding})


def test_the_sample_model(samples: tuple[Decoder, Decoder], smollm2: Path) -> None:
    stored, plain = samples
    assert bytes_per_step(stored.weights) < 0.45 * bytes_per_step(plain.weights)
    check_same(stored, plain, passage_ids(smollm2, 300))


def test_chains(samples: tuple[Decoder, Decoder], smollm2: Path) -> None:
    token_ids = passage_ids(smollm2, 300)
    chunks = [TokenRange(start, end) for start, end in pairwise([0, 200, 300])]
    found = []
    for decoder in samples:
        with ChainGroup(decoder, len(chunks)) as group:
            run = group.submit(group.prepare(token_ids, chunks))
            found.append((run.kv(decoder.layout), run.first_token()))
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]


@pytest.mark.parametrize("speculation", ["off", "streaming", "ngram"])
def test_drafts(speculation: str, samples: tuple[Decoder, Decoder], smollm2: Path) -> None:
    stored, plain = samples
    token_ids = passage_ids(smollm2, 90)
    with harness(decoder=stored, max_slot_tokens=256, speculation=speculation) as made:
        check_answer(plain, token_ids, made.answer(token_ids, PARAMS).token_ids)


def test_selected_keys(samples: tuple[Decoder, Decoder], smollm2: Path) -> None:
    """With a selection of all keys, which must be those that the plain model attends to."""
    stored, plain = samples
    token_ids = passage_ids(smollm2, 90)
    policy = infinigen(prepared(ALL, decoder=stored), stored)
    with harness(decoder=stored, max_slot_tokens=256, policy=policy, poison=False) as made:
        check_answer(plain, token_ids, made.answer(token_ids, PARAMS).token_ids)


def check_answer(plain: Decoder, prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> None:
    """Each token is the one that the plain model chooses after the tokens before it, or its logit is as large up to
    what steps in bf16 differ by."""
    assert len(answer_ids) == PARAMS.max_tokens
    logits_TV = steps(plain, [*prompt_ids, *answer_ids[:-1]], 1)[-len(answer_ids) :].float()
    chosen_T = logits_TV.gather(1, torch.tensor(answer_ids).unsqueeze(1)).squeeze(1)
    gaps_T = logits_TV.amax(1) - chosen_T
    assert (gaps_T <= 0.5).all() and (gaps_T > 0).sum() <= 2, gaps_T


@torch.inference_mode()
@pytest.mark.parametrize(("panels", "num_new"), [(WIDENED, 1), (WIDENED, 9), (DOT, 1), (DOT, 9)])
def test_exact_weights_err_no_more(
    panels: str, num_new: int, folders: tuple[Path, Path], smollm2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The logits of steps of few tokens, and of all where operands are widened, are as close to fp32 as those of
    weights in bf16, each compared with its own weights in fp32."""
    monkeypatch.setattr(KERNELS, "_choice", KernelChoice(processor_kind(), WIDENED, panels, None))
    token_ids, errors = passage_ids(smollm2, 200), []
    for folder in folders:
        exact, rounded = load_decoder(folder), load_decoder(folder, dtype="bfloat16")
        logits = [steps(each, token_ids, num_new) for each in (exact, rounded)]
        errors.append((logits[1].double() - logits[0].double()).square().mean().sqrt())
    print(f"{panels}, {num_new} tokens: RMS errors of logits {errors[0]:.4f} and {errors[1]:.4f}")
    assert 0.01 < errors[0] <= 1.05 * errors[1]
