"""OPT's configs, as they were released, and what its loader makes of a checkpoint."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from baton.errors import ModelError
from baton.modeling.checkpoints.registry import read_model
from baton.modeling.families.opt import OptModel
from baton.modeling.forward.decoder import Decoder
from baton.modeling.forward.layers import PlainMlp, PostNorm, Sequential
from baton.modeling.forward.model_config import ModelConfig
from baton.modeling.forward.norms import LayerNorm, unchanged
from tests.support.models.configs import refusal, write_and_load

OPT_125M: dict[str, Any] = {
    "activation_function": "relu",
    "architectures": ["OPTForCausalLM"],
    "bos_token_id": 2,
    "do_layer_norm_before": True,
    "eos_token_id": 2,
    "ffn_dim": 3072,
    "hidden_size": 768,
    "max_position_embeddings": 2048,
    "model_type": "opt",
    "num_attention_heads": 12,
    "num_hidden_layers": 2,
    "pad_token_id": 1,
    "vocab_size": 50272,
    "word_embed_proj_dim": 768,
}
OPT_350M = {
    **OPT_125M,
    "do_layer_norm_before": False,
    "ffn_dim": 4096,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "word_embed_proj_dim": 512,
}
VOCAB, HIDDEN, INNER, CONTEXT, NARROW = 11, 8, 12, 6, 4
TINY = {
    **OPT_125M,
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "ffn_dim": INNER,
    "num_attention_heads": 2,
    "max_position_embeddings": CONTEXT,
    "word_embed_proj_dim": None,
}


def model(base: dict[str, Any], **changes: object) -> OptModel:
    made = read_model({**base, **changes}, source="folder/config.json")
    assert isinstance(made, OptModel)
    return made


def tensors(narrow: bool = False) -> dict[str, Tensor]:
    """A tiny checkpoint's; with the projections of a narrow embedding, and without a final norm, as opt-350m's."""
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (VOCAB, NARROW if narrow else HIDDEN),
        "embed_positions.weight": (2 + CONTEXT, HIDDEN),
    }
    norms = [] if narrow else ["final_layer_norm"]
    if narrow:
        shapes |= {"project_in.weight": (HIDDEN, NARROW), "project_out.weight": (NARROW, HIDDEN)}
    for at in ("layers.0", "layers.1"):
        norms += [f"{at}.self_attn_layer_norm", f"{at}.final_layer_norm"]
        linears = {f"{at}.self_attn.{name}_proj": (HIDDEN, HIDDEN) for name in ("q", "k", "v", "out")}
        linears |= {f"{at}.fc1": (INNER, HIDDEN), f"{at}.fc2": (HIDDEN, INNER)}
        for name, shape in linears.items():
            shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    shapes |= {f"{name}.{kind}": (HIDDEN,) for name in norms for kind in ("weight", "bias")}
    generator = torch.Generator().manual_seed(0)
    return {f"model.decoder.{name}": torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def load(folder: Path, content: dict[str, Tensor], **changes: object) -> Decoder:
    return write_and_load(folder, {**TINY, **changes}, content)


def test_opt_125m() -> None:
    assert model(OPT_125M) == OptModel(
        ModelConfig(
            model_type="opt",
            vocab_size=50272,
            num_layers=2,
            hidden_size=768,
            intermediate_size=3072,
            num_heads=12,
            num_kv_heads=12,
            head_dim=64,
            max_position=2048,
            tie_embeddings=True,
            windows=(None, None),
            eos_token_ids=(2,),
            bos_token_id=2,
            is_gated=False,
        ),
        embedding_size=768,
        activation="relu",
        norm_first=True,
        final_norm=True,
        bias=True,
        norm_parameters=True,
    )


def test_opt_350m_norms_last_and_embeds_narrowly() -> None:
    made = model(OPT_350M)
    assert (made.norm_first, made.final_norm, made.embedding_size, made.config.hidden_size) == (False, False, 512, 1024)


def test_fields_left_out_mean_what_they_mean_to_transformers() -> None:
    bare = {key: value for key, value in OPT_125M.items() if key not in ("activation_function", "do_layer_norm_before")}
    assert model({**bare, "word_embed_proj_dim": None}) == model(OPT_125M)


def test_old_finetunes_may_have_no_final_norm() -> None:
    made = model(OPT_125M, _remove_final_layer_norm=True)
    assert (made.norm_first, made.final_norm) == (True, False)


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("activation_function", "swish", "'swish' is not supported; choose a model that uses relu or gelu"),
        ("num_attention_heads", 7, "7 does not divide hidden_size 768; correct the file"),
        ("ffn_dim", None, "is missing; add it"),
        ("word_embed_proj_dim", 0, "0 is not a number above 0"),
        ("do_layer_norm_before", "no", "'no' is neither true nor false"),
        ("architectures", ["OPTForSequenceClassification"], "is not supported; choose a model whose architecture is"),
    ],
)
def test_config_that_cannot_be_run_is_refused_in_one_line(field: str, value: object, problem: str) -> None:
    message = refusal({**OPT_125M, field: value})
    assert message.startswith(f"{field}: ") and problem in message


def test_query_key_and_value_become_one_projection(tmp_path: Path) -> None:
    content = tensors()
    layer = load(tmp_path, content).weights.layers[1]
    for kind, fused in (("weight", layer.qkv.weight()), ("bias", layer.qkv.bias())):
        parts = [content[f"model.decoder.layers.1.self_attn.{name}_proj.{kind}"] for name in "qkv"]
        assert fused is not None and torch.equal(fused, torch.cat(parts))


def test_layers_are_composed_as_the_config_says(tmp_path: Path) -> None:
    first = load(tmp_path, tensors()).weights
    assert isinstance(first.layers[0].tail, Sequential)
    assert isinstance(first.layers[0].tail.mlp, PlainMlp)
    assert isinstance(first.final_norm, LayerNorm)
    last = load(tmp_path, tensors(narrow=True), do_layer_norm_before=False, word_embed_proj_dim=NARROW).weights
    assert isinstance(last.layers[0].tail, PostNorm)
    assert last.layers[0].attention_norm is last.final_norm is unchanged


def test_positions_start_at_the_tables_third_row(tmp_path: Path) -> None:
    content = tensors()
    hidden_TD = torch.zeros(2, HIDDEN)
    load(tmp_path, content).weights.positions.lookup(torch.tensor([0, CONTEXT - 1])).enter(hidden_TD)
    assert torch.equal(hidden_TD, content["model.decoder.embed_positions.weight"][[2, CONTEXT + 1]])


def test_narrow_embeddings_are_widened_once(tmp_path: Path) -> None:
    content = tensors(narrow=True)
    weights = load(tmp_path, content, do_layer_norm_before=False, word_embed_proj_dim=NARROW).weights
    embedding, project_in, project_out = (
        content[f"model.decoder.{name}.weight"].double() for name in ("embed_tokens", "project_in", "project_out")
    )
    torch.testing.assert_close(weights.embedding.weight().double(), embedding @ project_in.T, atol=1e-5, rtol=0)
    torch.testing.assert_close(weights.head.weight().double(), embedding @ project_out, atol=1e-5, rtol=0)


def test_a_base_models_names_lack_the_first_part(tmp_path: Path) -> None:
    content = tensors()
    expected = load(tmp_path, content).weights
    short = load(tmp_path, {name.removeprefix("model."): value for name, value in content.items()}).weights
    assert torch.equal(short.embedding.weight(), expected.embedding.weight())
    assert torch.equal(short.layers[1].qkv.weight(), expected.layers[1].qkv.weight())


@pytest.mark.parametrize("name", sorted(tensors(narrow=True)))
def test_missing_tensor_is_named(name: str, tmp_path: Path) -> None:
    content = tensors(narrow=True)
    del content[name]
    with pytest.raises(ModelError, match=f"tensor {name} is missing; download the model again"):
        load(tmp_path, content, do_layer_norm_before=False, word_embed_proj_dim=NARROW)


def test_biases_that_the_config_denies_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="12 unknown tensors, the first is model.decoder.layers.0.fc1.bias"):
        load(tmp_path, tensors(), enable_bias=False)


def test_fingerprint_depends_on_switches_that_no_tensor_shows_but_not_on_eos(tmp_path: Path) -> None:
    made = load(tmp_path, tensors()).weights.fingerprint
    assert load(tmp_path, tensors(), activation_function="gelu").weights.fingerprint != made
    assert load(tmp_path, tensors(), eos_token_id=5).weights.fingerprint == made
