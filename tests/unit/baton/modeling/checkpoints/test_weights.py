"""Loading safetensors: fusing, converting, tying, sharding; and one clear line for each thing that can be wrong."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from baton.errors import ModelError
from baton.modeling.checkpoints.weights import load_config, load_decoder
from baton.modeling.forward.layers import GatedMlp, Sequential
from baton.modeling.kernels import native
from tests.support.models.tiny_gguf import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    INNER,
    KV_HEADS,
    LAYERS,
    VOCAB,
    hf_name,
    tiny_tensors,
)

Tensors = dict[str, Tensor]


def config_json(**changes: object) -> dict[str, object]:
    return {
        "model_type": "llama",
        "vocab_size": VOCAB,
        "num_hidden_layers": LAYERS,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
        **changes,
    }


def tensors(seed: int = 0) -> Tensors:
    return {hf_name(name): torch.from_numpy(value) for name, value in tiny_tensors("llama", seed).items()}


def write(folder: Path, content: Tensors, **changes: object) -> Path:
    """A folder with one safetensors file."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_json(**changes)))
    save_file(content, folder / "model.safetensors")
    return folder


def write_sharded(folder: Path, content: Tensors) -> Path:
    """The same in two files with an index, the tensors dealt out in turn."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config_json()))
    weight_map = {name: f"model-{place % 2}.safetensors" for place, name in enumerate(content)}
    for file_name in set(weight_map.values()):
        save_file({name: content[name] for name in content if weight_map[name] == file_name}, folder / file_name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def refusal(folder: Path, dtype: str = "float32") -> str:
    with pytest.raises(ModelError) as refused:
        load_decoder(folder, dtype=dtype)
    message = str(refused.value)
    assert ";" in message or ": " in message
    assert "\n" not in message
    return message


def test_query_key_and_value_become_one_projection(tmp_path: Path) -> None:
    content = tensors()
    layer = load_decoder(write(tmp_path, content)).weights.layers[1]
    parts = [content[f"model.layers.1.self_attn.{name}_proj.weight"] for name in "qkv"]
    assert torch.equal(layer.qkv.weight(), torch.cat(parts))


def test_gate_and_up_become_one_projection(tmp_path: Path) -> None:
    content = tensors()
    tail = load_decoder(write(tmp_path, content)).weights.layers[0].tail
    parts = [content[f"model.layers.0.mlp.{name}_proj.weight"] for name in ("gate", "up")]
    assert isinstance(tail, Sequential)
    assert isinstance(tail.mlp, GatedMlp)
    assert torch.equal(tail.mlp.gate_up.weight(), torch.cat(parts))


def test_tied_head_shares_the_embeddings_memory(tmp_path: Path) -> None:
    weights = load_decoder(write(tmp_path, tensors())).weights
    assert weights.head is weights.embedding


def test_untied_head_is_loaded(tmp_path: Path) -> None:
    head = torch.randn(VOCAB, HIDDEN)
    folder = write(tmp_path, {**tensors(), "lm_head.weight": head}, tie_word_embeddings=False)
    assert torch.equal(load_decoder(folder).weights.head.weight(), head)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_weights_are_converted_on_load(stored: torch.dtype, dtype: str, tmp_path: Path) -> None:
    content = {name: value.to(stored) for name, value in tensors().items()}
    decoder = load_decoder(write(tmp_path, content), dtype=dtype)
    expected = content["model.embed_tokens.weight"].to(getattr(torch, dtype))
    assert torch.equal(decoder.weights.embedding.weight(), expected)
    assert decoder.weights.layers[0].qkv.weight().dtype == decoder.dtype == getattr(torch, dtype)
    assert decoder.layout.dtype == dtype


@pytest.mark.skipif(not native.load(), reason="there is no compiler")
def test_weights_rounded_to_int8_are_another_model_close_to_the_first(tmp_path: Path) -> None:
    folder = write(tmp_path, tensors())
    plain = load_decoder(folder, dtype="bfloat16").weights
    rounded = load_decoder(folder, dtype="bfloat16", weights="int8").weights
    assert rounded.fingerprint != plain.fingerprint
    assert rounded.dtype == torch.bfloat16
    for mine, loaded in ((rounded.head, plain.head), (rounded.layers[1].qkv, plain.layers[1].qkv)):
        weight_NK = loaded.weight().float()
        step_N1 = weight_NK.abs().amax(1, keepdim=True) / 127
        assert ((mine.weight().float() - weight_NK).abs() <= 0.501 * step_N1).all()


def test_unknown_form_of_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="weights 'int4' is not supported; choose one of stored, bfloat16, int8"):
        load_decoder(write(tmp_path, tensors()), weights="int4")


def test_loaded_weights_do_not_depend_on_the_file_any_more(tmp_path: Path) -> None:
    folder = write(tmp_path, tensors())
    weights = load_decoder(folder).weights
    size = (folder / "model.safetensors").stat().st_size
    with (folder / "model.safetensors").open("r+b") as file:
        file.write(b"\0" * size)
    assert torch.equal(weights.head.weight(), tensors()["model.embed_tokens.weight"])


def test_sharded_checkpoint_equals_the_single_file(tmp_path: Path) -> None:
    single = load_decoder(write(tmp_path / "single", tensors())).weights
    sharded = load_decoder(write_sharded(tmp_path / "sharded", tensors())).weights
    assert torch.equal(sharded.layers[1].qkv.weight(), single.layers[1].qkv.weight())
    assert sharded.fingerprint == single.fingerprint


def test_fingerprint_is_the_same_for_the_same_content(tmp_path: Path) -> None:
    first = load_decoder(write(tmp_path / "first", tensors())).weights.fingerprint
    assert load_decoder(write(tmp_path / "second", tensors())).weights.fingerprint == first


@pytest.mark.parametrize("name", sorted(tensors()))
def test_fingerprint_depends_on_every_tensors_last_bit(name: str, tmp_path: Path) -> None:
    content = tensors()
    before = load_decoder(write(tmp_path, content)).weights.fingerprint
    content[name].view(torch.int32).view(-1)[-1] ^= 1
    assert load_decoder(write(tmp_path, content)).weights.fingerprint != before


def test_fingerprint_depends_on_each_tensors_place(tmp_path: Path) -> None:
    content = tensors()
    before = load_decoder(write(tmp_path, content)).weights.fingerprint
    first, second = "model.layers.0.mlp.down_proj.weight", "model.layers.1.mlp.down_proj.weight"
    content[first], content[second] = content[second], content[first]
    assert load_decoder(write(tmp_path, content)).weights.fingerprint != before


def test_fingerprint_depends_on_the_dtype_and_on_rope_but_not_on_eos(tmp_path: Path) -> None:
    folder = write(tmp_path, tensors())
    before = load_decoder(folder).weights.fingerprint
    assert load_decoder(folder, dtype="bfloat16").weights.fingerprint != before
    assert load_decoder(write(tmp_path, tensors(), rope_theta=5e5)).weights.fingerprint != before
    assert load_decoder(write(tmp_path, tensors(), eos_token_id=9)).weights.fingerprint == before


def test_eos_comes_from_generation_config_first(tmp_path: Path) -> None:
    folder = write(tmp_path, tensors(), eos_token_id=3)
    assert load_config(folder).eos_token_ids == (3,)
    (folder / "generation_config.json").write_text('{"eos_token_id": [4, 5]}')
    assert load_config(folder).eos_token_ids == (4, 5)


def test_inverse_frequencies_left_over_are_harmless(tmp_path: Path) -> None:
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    before = load_decoder(write(tmp_path, tensors())).weights.fingerprint
    assert load_decoder(write(tmp_path, {**tensors(), **extra})).weights.fingerprint == before


def test_tied_head_that_is_stored_again_is_harmless_and_changes_no_fingerprint(tmp_path: Path) -> None:
    content = tensors()
    before = load_decoder(write(tmp_path, content)).weights.fingerprint
    content["lm_head.weight"] = content["model.embed_tokens.weight"].clone()
    assert load_decoder(write(tmp_path, content)).weights.fingerprint == before


def test_stored_head_that_differs_from_the_tied_embedding_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path, {**tensors(), "lm_head.weight": torch.zeros(VOCAB, HIDDEN)})
    assert "set tie_word_embeddings to false" in refusal(folder)


@pytest.mark.parametrize("name", ["model.layers.2.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.bias"])
def test_other_tensors_left_over_are_refused(name: str, tmp_path: Path) -> None:
    assert name in refusal(write(tmp_path, {**tensors(), name: torch.ones(3)}))


@pytest.mark.parametrize("name", sorted(tensors()))
def test_missing_tensor_is_named(name: str, tmp_path: Path) -> None:
    content = tensors()
    del content[name]
    assert f"tensor {name} is missing" in refusal(write(tmp_path, content))


def test_wrong_shape_names_both_shapes(tmp_path: Path) -> None:
    name = "model.layers.1.self_attn.k_proj.weight"
    message = refusal(write(tmp_path, {**tensors(), name: torch.ones(16, HIDDEN)}))
    assert f"tensor {name} has shape [16, 64], config.json asks for [32, 64]" in message


def test_integer_weights_are_refused(tmp_path: Path) -> None:
    content = {**tensors(), "model.norm.weight": torch.ones(HIDDEN, dtype=torch.int8)}
    assert "torch.int8" in refusal(write(tmp_path, content))


@pytest.mark.parametrize("fraction", [0.0, 0.001, 0.5, 0.999])
def test_truncated_file_is_refused(fraction: float, tmp_path: Path) -> None:
    path = write(tmp_path, tensors()) / "model.safetensors"
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * fraction)])
    assert "model.safetensors: cannot be read" in refusal(tmp_path)


def test_missing_shard_is_named(tmp_path: Path) -> None:
    folder = write_sharded(tmp_path / "sharded", tensors())
    (folder / "model-1.safetensors").unlink()
    assert "names model-1.safetensors, which is not in" in refusal(folder)


def test_index_may_not_name_files_elsewhere(tmp_path: Path) -> None:
    write(tmp_path / "other", tensors())
    folder = write_sharded(tmp_path / "sharded", tensors())
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../other/model.safetensors"}}')
    assert "names ../other/model.safetensors" in refusal(folder)


def test_index_without_weight_map_is_refused(tmp_path: Path) -> None:
    folder = write_sharded(tmp_path / "sharded", tensors())
    (folder / "model.safetensors.index.json").write_text("{}")
    assert "weight_map is missing" in refusal(folder)


def test_pickled_weights_are_refused_unread(tmp_path: Path) -> None:
    (write(tmp_path, tensors()) / "model.safetensors").unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"would run code")
    message = refusal(tmp_path)
    assert "pytorch_model.bin" in message
    assert "convert them to safetensors" in message


def test_folder_without_weights_is_refused(tmp_path: Path) -> None:
    (write(tmp_path, tensors()) / "model.safetensors").unlink()
    assert "holds no model.safetensors" in refusal(tmp_path)


def test_missing_folder_is_refused(tmp_path: Path) -> None:
    assert "is not a model folder" in refusal(tmp_path / "none")


def test_folder_without_config_is_refused(tmp_path: Path) -> None:
    assert "config.json: cannot be read" in refusal(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", "\xff"])
def test_config_that_is_no_json_object_is_refused(text: str, tmp_path: Path) -> None:
    (write(tmp_path, tensors()) / "config.json").write_text(text, encoding="latin-1")
    assert "config.json: is not" in refusal(tmp_path)


def test_unknown_dtype_is_refused(tmp_path: Path) -> None:
    assert "dtype 'int4' is not supported; choose one of" in refusal(write(tmp_path, tensors()), dtype="int4")


def test_model_larger_than_memory_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path, tensors(), vocab_size=2**50)
    assert "cannot allocate on device 'cpu'" in refusal(folder)
