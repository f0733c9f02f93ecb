"""Settings in quantization_config, and the one line that refuses unsupported ones."""

from typing import Any

import pytest

from baton.errors import ModelError
from baton.modeling.quantized.awq import AwqFormat
from baton.modeling.quantized.fp8 import Fp8Format
from baton.modeling.quantized.gptq import GptqFormat
from baton.modeling.quantized.weight_formats import read_format
from tests.support.models.quantised_folders import FORMATS, compressed_config

SOURCE = "folder/config.json: quantization_config"
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
PACKED = compressed_config("pack-quantized", type="int", num_bits=4, strategy="group", group_size=128)


def refusal(config: object) -> str:
    with pytest.raises(ModelError) as refused:
        read_format(config, SOURCE)
    message = str(refused.value)
    assert message.startswith(SOURCE)
    assert "\n" not in message and message.count("; ") >= 1
    return message.removeprefix(f"{SOURCE}: ")


def weights(**changes: Any) -> dict[str, Any]:
    """PACKED with changes in what describes its weights."""
    group = PACKED["config_groups"]["group_0"]
    return {**PACKED, "config_groups": {"group_0": {**group, "weights": {**group["weights"], **changes}}}}


@pytest.mark.parametrize(
    ("name", "description"),
    [
        ("gptq", "gptq, 4 bits, one group"),
        ("gptq_8_bits", "gptq, 8 bits, groups of 32, inputs reordered"),
        ("awq_groups_of_64", "awq, 4 bits, groups of 64"),
        ("fp8_blocks", "fp8, blocks of 128 x 128"),
        ("fp8_tensor", "fp8, a scale a weight"),
        ("packed_int4", "compressed-tensors, pack-quantized int4 by group"),
        ("float_channel", "compressed-tensors, float-quantized float8 by channel"),
    ],
)
def test_description(name: str, description: str) -> None:
    assert read_format(FORMATS[name].config, SOURCE).description == description


@pytest.mark.parametrize(
    "method", ["bitsandbytes", "eetq", "hqq", "marlin", "gptq_marlin", "aqlm", "quanto", "mxfp4", "modelopt", None, 4]
)
def test_other_methods_are_refused(method: object) -> None:
    message = refusal({"quant_method": method, "bits": 4})
    assert message.startswith(f"quant_method: {method!r} is not supported; use the unquantised model, a GGUF file, or ")
    assert message.endswith("weights in compressed-tensors, fp8, awq, gptq")


@pytest.mark.parametrize("config", ["gptq", 4, ["gptq"]])
def test_config_that_is_no_object_is_refused(config: object) -> None:
    assert refusal(config).startswith("is not an object; ")


@pytest.mark.parametrize(
    ("base", "field", "value", "problem"),
    [
        (GPTQ, "bits", 2, "2 is not supported"),
        (GPTQ, "bits", 3, "3 is not supported"),
        (GPTQ, "bits", None, "is missing"),
        (GPTQ, "bits", "4", "'4' is not a number above 0"),
        (GPTQ, "group_size", 0, "0 is not a number above 0"),
        (GPTQ, "group_size", None, "is missing"),
        (GPTQ, "sym", "yes", "'yes' is neither true nor false"),
        (GPTQ, "checkpoint_format", "marlin", "'marlin' is not supported"),
        (GPTQ, "format", "bitblas", "'bitblas' is not supported"),
        (GPTQ, "is_marlin_format", True, "true is not supported"),
        (GPTQ, "pack_dtype", "int64", "'int64' is not supported"),
        (GPTQ, "dynamic", ["-:.*"], "is not an object of settings by module"),
        (GPTQ, "dynamic", {"+:(": {"bits": 8}}, "'(' is not a regular expression"),
        (GPTQ, "dynamic", {"+:.*": 8}, "+:.*: is not an object of settings"),
        (AWQ, "bits", 8, "8 is not supported"),
        (AWQ, "version", "gemv", "'gemv' is not supported"),
        (AWQ, "version", "marlin", "'marlin' is not supported"),
        (AWQ, "backend", "llm-awq", "'llm-awq' is not supported"),
        (AWQ, "zero_point", False, "false is not supported"),
        (FP8, "fmt", "e5m2", "'e5m2' is not supported"),
        (FP8, "scale_fmt", "int", "'int' is not supported"),
        (FP8, "weight_block_size", [128], "[128] is not a list of two whole numbers"),
        (FP8, "weight_block_size", [128, 0], "[128, 0] is not a list of two whole numbers"),
        (PACKED, "format", "marlin-24", "'marlin-24' is not supported"),
        (PACKED, "format", "nvfp4-pack-quantized", "'nvfp4-pack-quantized' is not supported"),
        (PACKED, "format", "mxfp4-pack-quantized", "'mxfp4-pack-quantized' is not supported"),
        (PACKED, "format", "dense", "'dense' is not supported"),
        (PACKED, "format", None, "None is not supported"),
        (PACKED, "sparsity_config", {"format": "sparse-24-bitmask"}, "format 'sparse-24-bitmask' is not supported"),
        (PACKED, "transform_config", {"config_groups": {"R1": {}}}, "is not supported"),
        (PACKED, "config_groups", ["group_0"], "is not an object of schemes by name"),
        (PACKED, "config_groups", {"W4A16": ["Linear"]}, "is not an object of schemes by name"),
    ],
)
def test_unsupported_setting_is_named(base: dict[str, Any], field: str, value: object, problem: str) -> None:
    assert refusal({**base, field: value}).startswith(f"{field}: {problem}")


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"num_bits": 3}, "num_bits: 3 of type int are not supported in pack-quantized"),
        ({"num_bits": 4, "type": "float"}, "num_bits: 4 of type float are not supported in pack-quantized"),
        ({"strategy": "tensor_group"}, "strategy: 'tensor_group' is not supported"),
        ({"group_size": None}, "group_size: is missing, and strategy is group"),
        ({"strategy": "block", "group_size": None}, "block_structure: is missing, and strategy is block"),
        ({"strategy": "block", "block_structure": "128"}, "block_structure: '128' is not a list of two whole numbers"),
    ],
)
def test_unsupported_weights_of_compressed_tensors_are_named(changes: dict[str, Any], problem: str) -> None:
    assert refusal(weights(**changes)).startswith(f"config_groups: group_0: weights: {problem}")


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"targets": "Linear"}, "targets: is not a list of texts"),
        ({"targets": ["re:("]}, "targets: '(' is not a regular expression"),
        ({"weights": 4}, "weights: is not an object of settings"),
        ({"format": "nvfp4-pack-quantized"}, "format: 'nvfp4-pack-quantized' is not supported"),
    ],
)
def test_unsupported_groups_of_compressed_tensors_are_named(changes: dict[str, Any], problem: str) -> None:
    group = {**PACKED["config_groups"]["group_0"], **changes}
    assert refusal({**PACKED, "config_groups": {"group_0": group}}).startswith(f"config_groups: group_0: {problem}")


def test_checkpoint_format_wins_over_format_and_capitals_do_not_matter() -> None:
    stored = read_format({**GPTQ, "checkpoint_format": "GPTQ_V2", "format": "gptq"}, SOURCE)
    assert isinstance(stored, GptqFormat) and not stored.less_one


def test_names_of_early_autoawq() -> None:
    early = {"quant_method": "awq", "zero_point": True, "q_group_size": 64, "w_bit": 4, "version": "GEMM"}
    assert read_format(early, SOURCE) == AwqFormat(64)


@pytest.mark.parametrize(
    ("config", "unused"),
    [
        (GPTQ, ()),
        (AWQ, ()),
        (FP8, ("quantisation of activations",)),
        (PACKED, ()),
        ({**PACKED, "kv_cache_scheme": {"num_bits": 8}}, ("quantisation of the KV cache",)),
        (compressed_config("int-quantized", type="int", num_bits=8), ("quantisation of activations",)),
    ],
)
def test_what_is_quantised_besides_weights_is_told(config: dict[str, Any], unused: tuple[str, ...]) -> None:
    assert read_format(config, SOURCE).unused == unused


def test_blocks_of_fp8_may_be_absent() -> None:
    assert read_format({"quant_method": "fp8"}, SOURCE) == Fp8Format(None)


def test_weights_that_are_stored_dense_among_zeros_are_read() -> None:
    assert read_format({**PACKED, "sparsity_config": {"format": "dense"}, "transform_config": None}, SOURCE).description


def test_block_structure_as_text() -> None:
    early = compressed_config("float-quantized", type="float", num_bits=8, strategy="block", block_structure="64x128")
    today = compressed_config("float-quantized", type="float", num_bits=8, strategy="block", block_structure=[64, 128])
    assert read_format(early, SOURCE) == read_format(today, SOURCE)
