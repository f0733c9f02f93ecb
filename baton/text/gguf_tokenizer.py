"""Converts the tokenizer in a GGUF file to Hugging Face files, which `baton.text.tokenizer` can load.

`deploy.machine.model_folder` calls it once for each model, when the model's GGUF file is converted. Needs numpy, never
torch. A function of transformers converts llama.cpp's vocabulary to a `tokenizers` pipeline. This module corrects its
result where it differs from llama.cpp and from the tokenizer.json of the original model:

- For models that first split off each digit, such as smollm, the pre-tokenizer of GPT-2 is replaced, because it would
  merge the spaces before a digit.
- For Llama 3, a word that is in the vocabulary becomes one token, regardless of the merges, and a text begins with BOS
  by default.
- Default special tokens (<|endoftext|>) that are not in the vocabulary are removed. Their ids would be above the size
  of the vocabulary, and the model has no embeddings for such ids.
"""

import json
from pathlib import Path
from typing import Any

from gguf import GGUFReader
from tokenizers import Tokenizer as Core
from tokenizers import pre_tokenizers
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS, convert_gguf_tokenizer
from transformers.tokenization_utils_tokenizers import TokenizersBackend

from baton.errors import ModelError

_KINDS = ("gpt2", "llama")
"""Supported values of the field `tokenizer.ggml.model`: byte-level BPE ("gpt2") and SentencePiece BPE ("llama")."""
_GPT2_SPLIT = frozenset({"gpt-2", "mpt", "olmo", "jais", "trillion", "granite-docling"})
_DIGITS_FIRST = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"})
_LLAMA3 = frozenset({"llama3", "llama-v3", "llama-bpe"})
_SPECIAL_TOKENS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}

Fields = dict[str, Any]
"""Metadata of a GGUF file whose keys begin with `tokenizer.`, without this prefix. Example of keys: `ggml.tokens` and
`chat_template`."""


def write_tokenizer(gguf_path: Path, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and the chat template (if there is one) of a GGUF file to an existing
    folder.

    Only the metadata of the GGUF file is read. The call blocks for seconds. A second call writes the same files. Raises
    ModelError if the file cannot be read, or if its tokenizer is not supported.
    """
    architecture, fields = _read_fields(gguf_path)
    _check(fields, gguf_path)
    try:
        core = _build(architecture, fields)
        backend = TokenizersBackend(tokenizer_object=core, **_config(fields))  # type: ignore[no-untyped-call]
    except (ValueError, KeyError, IndexError) as error:
        raise ModelError(
            f"cannot build the tokenizer in {gguf_path}: {error!r:.200}; use the Hugging Face folder of the model"
        ) from error
    backend.save_pretrained(folder)


def _read_fields(gguf_path: Path) -> tuple[str, Fields]:
    try:
        reader = GGUFReader(gguf_path)
    except (OSError, ValueError, IndexError, KeyError) as error:
        raise ModelError(f"cannot read {gguf_path} as GGUF: {error!s:.200}; fetch the file again") from error
    prefix = "tokenizer."
    fields = {
        name.removeprefix(prefix): field.contents() for name, field in reader.fields.items() if name.startswith(prefix)
    }
    architecture = reader.fields.get("general.architecture")
    return (architecture.contents() if architecture is not None else ""), fields


def _check(fields: Fields, gguf_path: Path) -> None:
    remedy = "use the Hugging Face folder of the model"
    kind, pre = fields.get("ggml.model"), fields.get("ggml.pre")
    if kind not in _KINDS:
        raise ModelError(f"tokenizer {kind!r} in {gguf_path} is not supported (only {', '.join(_KINDS)}): {remedy}")
    for name in ("ggml.tokens", "ggml.token_type", *(["ggml.merges"] if kind == "gpt2" else [])):
        if not fields.get(name):
            raise ModelError(f"tokenizer.{name} is missing in {gguf_path}: {remedy}")
    known = GGUF_PRE_TOKENIZER_SPLITS.keys() | _GPT2_SPLIT | _DIGITS_FIRST
    if kind == "gpt2" and pre not in known:  # a wrong guess would go unnoticed and make every answer a little worse
        raise ModelError(f"pre-tokenizer {pre!r} in {gguf_path} is not known: {remedy}")


def _build(architecture: str, fields: Fields) -> Core:
    description = {
        "tokenizer_type": fields["ggml.model"],
        "pre_tokenizer_type": fields.get("ggml.pre"),
        "tokens": fields["ggml.tokens"],
        "token_type": fields["ggml.token_type"],
    }
    for name in ("scores", "merges"):
        if f"ggml.{name}" in fields:
            description[name] = fields[f"ggml.{name}"]
    core, _ = convert_gguf_tokenizer(architecture, description)
    pre = fields.get("ggml.pre")
    if pre in _DIGITS_FIRST:
        core.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    spec = json.loads(core.to_str())
    num_tokens = len(fields["ggml.tokens"])
    spec["added_tokens"] = [token for token in spec["added_tokens"] if token["id"] < num_tokens]
    if pre in _LLAMA3:
        spec["model"]["ignore_merges"] = True
    return Core.from_str(json.dumps(spec))


def _config(fields: Fields) -> dict[str, Any]:
    tokens = fields["ggml.tokens"]
    config: dict[str, Any] = {}
    for name, key in _SPECIAL_TOKENS.items():
        token_id = fields.get(f"ggml.{key}")
        config[name] = tokens[token_id] if token_id is not None else None
    begins_with_bos = fields["ggml.model"] == "llama" or fields.get("ggml.pre") in _LLAMA3
    add_bos, add_eos = fields.get("ggml.add_bos_token", begins_with_bos), fields.get("ggml.add_eos_token", False)
    config["add_bos_token"] = bool(add_bos) and config["bos_token"] is not None
    config["add_eos_token"] = bool(add_eos) and config["eos_token"] is not None
    if "chat_template" in fields:
        config["chat_template"] = fields["chat_template"]
    return config
