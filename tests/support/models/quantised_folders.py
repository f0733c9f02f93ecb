"""Tiny quantised models in folders, each with the plain model that has the same values."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.models.quantised import Maker, awq, gptq, packed_ints, plain_codes

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, LAYERS, VOCAB = 128, 256, 4, 2, 32, 2, 96
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "num_hidden_layers": LAYERS,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
SHARD_NAMES = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@dataclass(frozen=True)
class Stored:
    """A quantised format: the function that creates its weights, and the `quantization_config` that describes them."""

    make: Maker
    config: dict[str, Any]


def _gptq(**options: Any) -> Stored:
    config = {
        "quant_method": "gptq",
        "bits": options.get("bits", 4),
        "group_size": options.get("group_size", -1),
        "desc_act": options.get("act_order", False),
        "sym": options.get("symmetric", True),
    }
    if options.get("version") == 2:
        config["checkpoint_format"] = "gptq_v2"
    return Stored(partial(gptq, **options), config)


def _awq(group_size: int) -> Stored:
    config = {"quant_method": "awq", "bits": 4, "group_size": group_size, "version": "gemm", "zero_point": True}
    return Stored(partial(awq, group_size=group_size), config)


def compressed_config(format: str, **weights: Any) -> dict[str, Any]:
    """Return a `quantization_config` of compressed-tensors, as llm-compressor writes it. `weights` describes the
    weights."""
    settings = {"dynamic": False, "observer": "minmax", "symmetric": True, "group_size": None, **weights}
    activations = {"num_bits": 8, "type": settings["type"], "strategy": "token", "dynamic": True, "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": settings,
        "input_activations": None if format == "pack-quantized" else activations,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }


def _packed(bits: int, group_size: int, **options: Any) -> Stored:
    sharing: dict[str, Any] = {"strategy": "channel"}
    if group_size != -1:
        sharing = {"strategy": "group", "group_size": group_size}
    if options.get("reordered"):
        sharing["actorder"] = "group"
    symmetric = options.get("symmetric", True)
    config = compressed_config("pack-quantized", type="int", num_bits=bits, symmetric=symmetric, **sharing)
    return Stored(partial(packed_ints, bits=bits, group_size=group_size, **options), config)


def _by_codes(kind: str, strategy: str, symmetric: bool = True, **options: Any) -> Stored:
    sharing: dict[str, Any] = {"strategy": strategy}
    if strategy == "block":
        sharing["block_structure"] = list(options["block"])
    config = compressed_config(f"{kind}-quantized", type=kind, num_bits=8, symmetric=symmetric, **sharing)
    return Stored(partial(plain_codes, kind=kind, symmetric=symmetric, **options), config)


def _fp8(block: tuple[int, int] | None, **options: Any) -> Stored:
    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
    if block is None:
        return Stored(partial(plain_codes, block=_WHOLE, scale_shape=(), **options), config)
    return Stored(
        partial(plain_codes, block=block, scale_name="weight_scale_inv", **options),
        {**config, "weight_block_size": list(block)},
    )


_WHOLE = 1 << 30, 1 << 30
FORMATS = {
    "gptq": _gptq(),
    "gptq_groups_of_32": _gptq(group_size=32),
    "gptq_act_order": _gptq(group_size=64, act_order=True),
    "gptq_asymmetric": _gptq(group_size=64, symmetric=False),
    "gptq_v2": _gptq(group_size=128, symmetric=False, version=2),
    "gptq_8_bits": _gptq(bits=8, group_size=32, act_order=True, symmetric=False),
    "gptq_8_bits_v2": _gptq(bits=8, version=2, scale_dtype=torch.bfloat16),
    "awq": _awq(-1),
    "awq_groups_of_32": _awq(32),
    "awq_groups_of_64": _awq(64),
    "awq_groups_of_128": _awq(128),
    "packed_int4": _packed(4, 128),
    "packed_int4_asymmetric": _packed(4, 32, symmetric=False, scale_dtype=torch.float32),
    "packed_int4_reordered": _packed(4, 64, reordered=True),
    "packed_int8": _packed(8, -1),
    "packed_int8_asymmetric": _packed(8, 64, symmetric=False, scale_dtype=torch.float32),
    "int8_channel": _by_codes("int", "channel", scale_dtype=torch.bfloat16),
    "int8_tensor_asymmetric": _by_codes("int", "tensor", symmetric=False, block=_WHOLE, scale_shape=(1,)),
    "float_tensor": _by_codes("float", "tensor", block=_WHOLE, scale_shape=(1,), scale_dtype=torch.bfloat16),
    "float_channel": _by_codes("float", "channel"),
    "float_block": _by_codes("float", "block", block=(128, 128)),
    "fp8_blocks": _fp8((128, 128)),
    "fp8_blocks_cut_at_the_edges": _fp8((48, 80), scale_dtype=torch.bfloat16),
    "fp8_tensor": _fp8(None),
}
"""All supported formats by name, with variants of groups, zero points and orders of inputs."""


@dataclass(frozen=True)
class Pair:
    """A quantised model, and the plain fp32 model with the same values."""

    quantised: Path
    plain: Path


def write_pair(
    folder: Path, name: str, *, sharded: bool = False, extra: Mapping[str, Tensor] | None = None, **changes: Any
) -> Pair:
    """Write a model in format `name`, and the plain model with the same values. `changes` are applied to both
    config.json files. `extra` tensors are added to the quantised model. A model of type qwen2 has biases. A model with
    tied embeddings has no separate head."""
    config = {**CONFIG, **changes}
    stored, quantised, plain = FORMATS[name], dict[str, Tensor](), dict[str, Tensor]()
    for seed, (module, (num_outputs, num_inputs)) in enumerate(_linears().items()):
        made = stored.make(num_outputs, num_inputs, seed)
        quantised |= {f"{module}.{part}": tensor for part, tensor in made.tensors.items()}
        plain[f"{module}.weight"] = made.weight
    others = _others(config)
    _write(folder / "plain", {**plain, **others}, config)
    pair = Pair(folder / "quantised", folder / "plain")
    tensors = {**quantised, **others, **(extra or {})}
    _write(pair.quantised, tensors, {**config, "quantization_config": stored.config}, sharded=sharded)
    return pair


def quantise_folder(folder: Path, name: str) -> Pair:
    """Write two models next to a plain model of any family: one whose linear layers are random weights in format
    `name`, and the plain model with the same values. Both use the embeddings, head and norms of the model in
    `folder`."""
    config, stored = json.loads((folder / "config.json").read_text()), FORMATS[name]
    quantised = load_file(folder / "model.safetensors")
    plain = dict(quantised)
    linears = [
        each for each, tensor in plain.items() if tensor.dim() == 2 and "embed" not in each and "head" not in each
    ]
    for seed, each in enumerate(linears):
        num_outputs, num_inputs = quantised.pop(each).shape
        made, module = stored.make(num_outputs, num_inputs, seed), each.removesuffix(".weight")
        quantised |= {f"{module}.{part}": tensor for part, tensor in made.tensors.items()}
        plain[each] = made.weight
    pair = Pair(folder / "quantised", folder / "plain")
    _write(pair.plain, plain, config)
    _write(pair.quantised, quantised, {**config, "quantization_config": stored.config})
    return pair


def rewrite_config(folder: Path, **quantization: Any) -> Path:
    """Change fields of `quantization_config` in the folder's config.json, and return the folder."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] |= quantization
    path.write_text(json.dumps(config))
    return folder


def _linears() -> dict[str, tuple[int, int]]:
    width, kv_width = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes = {
        "self_attn.q_proj": (width, HIDDEN),
        "self_attn.k_proj": (kv_width, HIDDEN),
        "self_attn.v_proj": (kv_width, HIDDEN),
        "self_attn.o_proj": (HIDDEN, width),
        "mlp.gate_proj": (INNER, HIDDEN),
        "mlp.up_proj": (INNER, HIDDEN),
        "mlp.down_proj": (HIDDEN, INNER),
    }
    return {f"model.layers.{layer}.{name}": shape for layer in range(LAYERS) for name, shape in shapes.items()}


def _others(config: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return random tensors that are not quantised: embedding, head, norms and biases."""
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    tensors = {"model.embed_tokens.weight": 0.4 * random(VOCAB, HIDDEN), "model.norm.weight": 1 + 0.1 * random(HIDDEN)}
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = random(VOCAB, HIDDEN) / HIDDEN**0.5 * 1.5
    for layer in range(LAYERS):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{norm}.weight"] = 1 + 0.1 * random(HIDDEN)
    if config["model_type"] == "qwen2":
        for module, (num_outputs, _) in _linears().items():
            if module.endswith(("q_proj", "k_proj", "v_proj")):
                tensors[f"{module}.bias"] = 0.2 * random(num_outputs)
    return tensors


def _write(folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any], *, sharded: bool = False) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    if not sharded:
        save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})
        return
    places = {name: SHARD_NAMES[at % 2] for at, name in enumerate(tensors)}  # a weight's tensors are in both shards
    for shard in SHARD_NAMES:
        mine = {name: tensor for name, tensor in tensors.items() if places[name] == shard}
        save_file(mine, folder / shard, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
