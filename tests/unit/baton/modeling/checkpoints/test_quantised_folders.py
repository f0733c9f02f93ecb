"""Folders of quantised weights load as the plain folders that they stand for, bit for bit."""

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.errors import ModelError
from baton.modeling.checkpoints.stored_format import load_format
from baton.modeling.checkpoints.weights import load_config, load_decoder
from baton.modeling.forward.decoder import Decoder, DecoderWeights
from baton.modeling.forward.layers import GatedMlp, Sequential
from baton.modeling.forward.linear import Linear
from baton.modeling.kernels import native
from tests.support.models.quantised_folders import FORMATS, VOCAB, Pair, rewrite_config, write_pair
from tests.support.paths import advance, buffer_for, whole

TOKENS = [int(token) for token in torch.randint(0, VOCAB, (40,), generator=torch.Generator().manual_seed(3))]


def linears(weights: DecoderWeights) -> list[Linear]:
    found = [weights.embedding, weights.head]
    for layer in weights.layers:
        assert isinstance(layer.tail, Sequential) and isinstance(layer.tail.mlp, GatedMlp)
        found += [layer.qkv, layer.tail.output, layer.tail.mlp.gate_up, layer.tail.mlp.down]
    return found


def greedy(decoder: Decoder, prompt: list[int], num_tokens: int) -> list[int]:
    buffer = buffer_for(decoder, len(prompt) + num_tokens)
    answer = [int(advance(decoder, buffer, prompt, 0)[-1].argmax())]
    while len(answer) < num_tokens:
        answer.append(int(advance(decoder, buffer, answer[-1:], len(prompt) + len(answer) - 1)[0].argmax()))
    return answer


def refusal(folder: Path) -> str:
    with pytest.raises(ModelError) as refused:
        load_decoder(folder)
    message = str(refused.value)
    assert "\n" not in message and "; " in message
    return message


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return write_pair(tmp_path, "gptq_act_order")


@torch.inference_mode()
def check_alike(pair: Pair) -> None:
    """Every linear layer equal bit for bit, hence every logit, and the tokens of a short generation."""
    ours, plain = load_decoder(pair.quantised), load_decoder(pair.plain)
    for mine, expected in zip(linears(ours.weights), linears(plain.weights), strict=True):
        assert torch.equal(mine.weight(), expected.weight())
        biases = mine.bias(), expected.bias()
        assert biases == (None, None) or torch.equal(*biases)  # type: ignore[arg-type]
    logits_TV = whole(plain, TOKENS)
    assert logits_TV.std() > 0.5, "flat logits would prove nothing"
    assert torch.equal(whole(ours, TOKENS), logits_TV)
    assert greedy(ours, TOKENS[:9], 12) == greedy(plain, TOKENS[:9], 12)


@pytest.mark.parametrize("name", FORMATS)
def test_quantised_model_is_the_plain_model_that_it_stands_for(name: str, tmp_path: Path) -> None:
    check_alike(write_pair(tmp_path, name))


@pytest.mark.parametrize("name", ["awq_groups_of_64", "float_block", "packed_int4_asymmetric"])
def test_biases_tied_embeddings_and_shards(name: str, tmp_path: Path) -> None:
    check_alike(write_pair(tmp_path, name, sharded=True, model_type="qwen2", tie_word_embeddings=True))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_values_are_rounded_once_to_the_models_dtype(dtype: str, tmp_path: Path) -> None:
    pair = write_pair(tmp_path, "packed_int8_asymmetric")
    for mine, expected in zip(
        linears(load_decoder(pair.quantised, dtype=dtype).weights),
        linears(load_decoder(pair.plain, dtype=dtype).weights),
        strict=True,
    ):
        assert torch.equal(mine.weight(), expected.weight())


@pytest.mark.skipif(not native.load(), reason="there is no compiler")
def test_weights_are_rounded_to_int8_as_those_of_the_plain_model(tmp_path: Path) -> None:
    pair = write_pair(tmp_path, "fp8_blocks")
    mine, plain = (
        load_decoder(each, dtype="bfloat16", weights="int8").weights for each in (pair.quantised, pair.plain)
    )
    for ours, expected in zip(linears(mine), linears(plain), strict=True):
        assert torch.equal(ours.weight(), expected.weight())


def test_weights_larger_than_a_part_are_dequantised_part_by_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.modeling.families.checkpoint._PART_ELEMENTS", 64 * 128)
    for name in ("awq_groups_of_32", "gptq_act_order", "packed_int4_asymmetric", "fp8_blocks_cut_at_the_edges"):
        check_alike(write_pair(tmp_path / name, name))


def test_fingerprint_covers_the_stored_tensors_and_what_they_mean(pair: Pair, tmp_path: Path) -> None:
    before = load_decoder(pair.quantised).weights.fingerprint
    assert (
        before
        == load_decoder(write_pair(tmp_path / "again", "gptq_act_order", sharded=True).quantised).weights.fingerprint
    )
    assert before != load_decoder(pair.plain).weights.fingerprint
    asymmetric = load_decoder(rewrite_config(pair.quantised, sym=False)).weights.fingerprint
    version_2 = load_decoder(rewrite_config(pair.quantised, checkpoint_format="gptq_v2")).weights.fingerprint
    assert len({before, asymmetric, version_2}) == 3
    path = pair.quantised / "model.safetensors"
    for part in ("qweight", "qzeros", "scales", "g_idx"):
        tensors = load_file(path)
        name = f"model.layers.1.mlp.down_proj.{part}"
        tensors[name].view(torch.uint8).view(-1)[-4 if part == "g_idx" else -1] ^= 1
        save_file(tensors, path)
        changed = load_decoder(pair.quantised).weights.fingerprint
        assert changed != version_2, part
        version_2 = changed


def test_one_line_of_the_log_says_what_was_done(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    scales = {
        f"model.layers.{layer}.self_attn.{name}": torch.ones(1) for layer in (0, 1) for name in ("k_scale", "v_scale")
    }
    inputs = {"model.layers.0.mlp.down_proj.input_scale": torch.ones(1)}
    pair = write_pair(tmp_path, "float_tensor", extra={**scales, **inputs})
    rewrite_config(pair.quantised, kv_cache_scheme={"num_bits": 8, "type": "float"})
    with caplog.at_level(logging.WARNING):
        load_decoder(pair.quantised, dtype="bfloat16")
        load_decoder(pair.plain)
    (record,) = caplog.records
    assert record.getMessage() == (
        f"{pair.quantised}: compressed-tensors, float-quantized float8 by tensor: 14 weights dequantised to bfloat16; "
        "not used: quantisation of activations, quantisation of the KV cache, 4 KV-cache scales, 1 activation scales"
    )


def test_unused_scales_change_no_fingerprint(tmp_path: Path) -> None:
    extra = {"model.layers.0.self_attn.k_scale": torch.ones(1)}
    first = load_decoder(write_pair(tmp_path / "a", "fp8_tensor").quantised).weights.fingerprint
    assert load_decoder(write_pair(tmp_path / "b", "fp8_tensor", extra=extra).quantised).weights.fingerprint == first


def test_biases_of_zero_that_tools_add_are_harmless_and_others_are_refused(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.up_proj.bias"
    check_alike(write_pair(tmp_path / "zero", "gptq", extra={name: torch.zeros(256)}))
    wrong = write_pair(tmp_path / "wrong", "gptq", extra={name: torch.eye(256)[7]})
    assert f"1 unknown tensors, the first is {name}" in refusal(wrong.quantised)


def test_other_tensors_left_over_are_refused(tmp_path: Path) -> None:
    pair = write_pair(tmp_path, "awq", extra={"model.layers.0.mlp.up_proj.weight": torch.zeros(256, 128)})
    assert "1 unknown tensors, the first is model.layers.0.mlp.up_proj.weight" in refusal(pair.quantised)


def test_scales_of_activations_are_unknown_tensors_in_a_plain_folder(pair: Pair) -> None:
    tensors = load_file(pair.plain / "model.safetensors")
    save_file({**tensors, "model.layers.0.self_attn.k_scale": torch.ones(1)}, pair.plain / "model.safetensors")
    assert "1 unknown tensors, the first is model.layers.0.self_attn.k_scale" in refusal(pair.plain)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("gptq", "qzeros"),
        ("gptq", "scales"),
        ("gptq_act_order", "g_idx"),
        ("awq", "qzeros"),
        ("awq", "scales"),
        ("packed_int4", "weight_packed"),
        ("packed_int4_asymmetric", "weight_zero_point"),
        ("packed_int4_reordered", "weight_g_idx"),
        ("float_channel", "weight"),
        ("packed_int4", "weight_scale"),
        ("gptq", "qweight"),
    ],
)
def test_missing_tensor_is_named(name: str, part: str, tmp_path: Path) -> None:
    folder = write_pair(tmp_path, name).quantised
    tensors = load_file(folder / "model.safetensors")
    del tensors[f"model.layers.1.mlp.up_proj.{part}"]
    save_file(tensors, folder / "model.safetensors")
    # without the tensor that shows that a weight is quantised, the plain one is asked for
    expected = "weight" if part in ("qweight", "weight_scale") else part
    assert f"tensor model.layers.1.mlp.up_proj.{expected} is missing" in refusal(folder)


def test_codes_without_scales_are_no_weights(tmp_path: Path) -> None:
    folder = write_pair(tmp_path, "fp8_tensor").quantised
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight_scale"]
    save_file(tensors, folder / "model.safetensors")
    assert "tensor model.layers.1.mlp.up_proj.weight has type torch.float8_e4m3fn" in refusal(folder)


@pytest.mark.parametrize(
    ("name", "field", "value", "shapes"),
    [
        ("gptq_groups_of_32", "group_size", 64, "scales has shape [4, 128], config.json asks for [2, 128]"),
        ("gptq", "bits", 8, "qweight has shape [16, 128], config.json asks for [32, 128]"),
        ("awq", "group_size", 32, "qzeros has shape [1, 16], config.json asks for [4, 16]"),
        (
            "fp8_blocks",
            "weight_block_size",
            [64, 128],
            "weight_scale_inv has shape [1, 1], config.json asks for [2, 1]",
        ),
        (
            "fp8_blocks",
            "weight_block_size",
            None,
            "weight_scale_inv has shape [2, 1], config.json asks for [1, 1] or []",
        ),
    ],
)
def test_settings_that_do_not_fit_the_tensors_are_refused(
    name: str, field: str, value: object, shapes: str, tmp_path: Path
) -> None:
    folder = rewrite_config(write_pair(tmp_path, name).quantised, **{field: value})
    assert shapes in refusal(folder)


def test_settings_in_the_files_of_early_tools(tmp_path: Path) -> None:
    """AutoGPTQ and AutoAWQ wrote files of their own before config.json had `quantization_config`."""
    files = {
        "gptq_groups_of_32": ("quantize_config.json", {"bits": 4, "group_size": 32, "desc_act": False, "sym": True}),
        "awq_groups_of_32": (
            "quant_config.json",
            {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"},
        ),
    }
    for name, (file_name, settings) in files.items():
        pair = write_pair(tmp_path / name, name)
        config = json.loads((pair.plain / "config.json").read_text())
        (pair.quantised / "config.json").write_text(json.dumps(config))
        (pair.quantised / file_name).write_text(json.dumps(settings))
        check_alike(pair)


def test_packed_weights_without_their_settings_are_refused_by_what_is_missing(pair: Pair) -> None:
    (pair.quantised / "config.json").write_text((pair.plain / "config.json").read_text())
    name = "model.layers.0.self_attn.q_proj"
    assert f"tensor {name}.weight is missing; {name}.qweight exists: use the config.json" in refusal(pair.quantised)


def test_file_of_another_name_is_to_be_renamed(pair: Pair) -> None:
    (pair.quantised / "model.safetensors").rename(pair.quantised / "gptq_model-4bit-64g.safetensors")
    assert "; rename gptq_model-4bit-64g.safetensors to model.safetensors" in refusal(pair.quantised)


def test_early_name_of_the_field(tmp_path: Path) -> None:
    pair = write_pair(tmp_path, "float_channel")
    path = pair.quantised / "config.json"
    path.write_text(path.read_text().replace("quantization_config", "compression_config"))
    check_alike(pair)


def test_format_of_a_folder(pair: Pair) -> None:
    stored = load_format(pair.quantised)
    assert stored is not None
    assert stored.description == "gptq, 4 bits, groups of 64, inputs reordered"
    assert load_format(pair.plain) is None


def test_config_of_weights_that_cannot_be_read_is_refused_before_they_are(pair: Pair) -> None:
    rewrite_config(pair.quantised, bits=3)
    (pair.quantised / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="config.json: quantization_config: bits: 3 is not supported; choose GPTQ"):
        load_config(pair.quantised)
