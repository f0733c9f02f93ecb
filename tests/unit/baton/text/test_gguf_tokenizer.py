"""GGUF tokenizers against transformers' own reading of a GGUF file; by hand where llama.cpp differs from it."""

from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer

from baton.errors import ModelError
from baton.text.gguf_tokenizer import write_tokenizer
from baton.text.tokenizer import Tokenizer
from tests.support.models.tokenizers import (
    CHAT_TEMPLATE,
    sentencepiece_core,
    sentencepiece_merges,
    sentencepiece_tokens,
    smollm_gguf,
)

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
LETTERS = ["a", "b", "c", "ab", "abc", "\u0120", "\u0120a", "1"]
MERGES = ["a b", "\u0120 a"]
SAMPLES = [
    "Hello, world!",
    " leading and trailing ",
    "def f(x):\n    return x\t# comment\r\n\n",
    "1234567890 12,345.67 3rd 7th",
    "na\u00efve caf\u00e9 \u65e5\u672c\u8a9e \U0001f308\U0001f468\u200d\U0001f469\u200d\U0001f467 \u0416\u0443\u043a",
    "it's we'll THEY'RE I'd",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|><file_sep>",
    "https://example.org/a?b=c&d=%20#x",
]


@pytest.fixture(scope="module")
def golden() -> Any:
    path = smollm_gguf()
    return AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)


@pytest.fixture(scope="module")
def golden_digits(golden: Any) -> Any:
    """transformers' tokenizer with the pre-tokenizer that SmolLM was trained with: digits are cut out first."""
    core = golden.backend_tokenizer
    copy = type(core).from_str(core.to_str())
    copy.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return copy


def write_gguf(path: Path, tokens: list[str], types: list[int], **fields: Any) -> Path:
    """A GGUF file without tensors; `fields` are set by the writer's method `add_<name>`."""
    writer = GGUFWriter(path, "llama")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    for name, value in fields.items():
        getattr(writer, f"add_{name}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def byte_level_gguf(path: Path, pre: str, **fields: Any) -> Path:
    types = [CONTROL, CONTROL, USER_DEFINED, *[NORMAL] * len(LETTERS)]
    tokens = ["<|begin|>", "<|end|>", "<think>", *LETTERS]
    return write_gguf(path, tokens, types, tokenizer_model="gpt2", tokenizer_pre=pre, token_merges=MERGES, **fields)


def sentencepiece_gguf(path: Path, **fields: Any) -> Path:
    tokens = sentencepiece_tokens()
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * (len(tokens) - 259)]
    defaults = {
        "tokenizer_model": "llama",
        "token_scores": [float(-index) for index in range(len(tokens))],
        "token_merges": [" ".join(pair) for pair in sentencepiece_merges()],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unk_token_id": 0,
    }
    return write_gguf(path, tokens, types, **{**defaults, **fields})


def convert(path: Path) -> Tokenizer:
    folder = path.parent / "folder"
    folder.mkdir(exist_ok=True)
    write_tokenizer(path, folder)
    return Tokenizer.load(folder)


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.decode([token_id]) for token_id in tokenizer.encode(text)]


@pytest.mark.parametrize("text", SAMPLES)
def test_text_is_tokenized_as_by_transformers(smollm: Tokenizer, golden: Any, text: str) -> None:
    assert smollm.encode(text) == golden.encode(text)


@given(text=st.text(st.characters(exclude_categories=["Cs", "N"])))
def test_any_text_without_digits_is_tokenized_as_by_transformers(smollm: Tokenizer, golden: Any, text: str) -> None:
    assert smollm.encode(text) == golden.encode(text)


@given(text=st.text(st.sampled_from("ab 17\n.\u00b2\u0663\u65e5")))
def test_any_text_is_tokenized_as_by_transformers_with_smollms_pre_tokenizer(
    smollm: Tokenizer, golden_digits: Any, text: str
) -> None:
    assert smollm.encode(text) == golden_digits.encode(text).ids


def test_spaces_before_a_digit_stay_together(smollm: Tokenizer) -> None:
    assert pieces(smollm, "a  12") == ["a", "  ", "1", "2"]


def test_ids_are_decoded_as_by_transformers(smollm: Tokenizer, golden: Any) -> None:
    ids = [1, *golden.encode("".join(SAMPLES)), 2, 300, 49151]
    assert smollm.decode(ids) == golden.decode(ids, skip_special_tokens=True)


def test_chat_is_rendered_as_by_transformers(smollm: Tokenizer, golden: Any) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?\n"}]
    expected = golden.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert smollm.encode_chat(messages) == expected


def test_control_tokens_are_special(smollm: Tokenizer) -> None:
    for token_id, token in ((0, "<|endoftext|>"), (1, "<|im_start|>"), (2, "<|im_end|>")):
        assert smollm.encode(token) == [token_id]
        assert smollm.decode([token_id]) == ""


def test_transformers_reads_the_folder_alike(smollm_folder: Path, golden: Any) -> None:
    ours = AutoTokenizer.from_pretrained(smollm_folder, local_files_only=True)
    names = ("bos_token_id", "eos_token_id", "unk_token_id", "pad_token_id", "chat_template")
    assert [getattr(ours, name) for name in names] == [getattr(golden, name) for name in names]
    assert len(ours) == len(golden)


def test_sentencepiece_is_tokenized_as_by_transformers(tmp_path: Path) -> None:
    path = sentencepiece_gguf(tmp_path / "model.gguf")
    golden = AutoTokenizer.from_pretrained(str(tmp_path), gguf_file=path.name)
    ours = convert(path)
    for text in ("hello world", "  hello a", "h\u00e9llo", "<s>a</s>", "a\nb"):
        assert ours.encode(text) == golden.encode(text)
        assert ours.decode(ours.encode(text)) == golden.decode(golden.encode(text), skip_special_tokens=True)


def test_sentencepiece_begins_with_bos_and_falls_back_to_bytes(tmp_path: Path) -> None:
    ours = convert(sentencepiece_gguf(tmp_path / "model.gguf"))
    assert ours.encode("hello \u00e9") == sentencepiece_core().encode("hello \u00e9").ids
    assert ours.encode("hello")[0] == 1


def test_sentencepiece_begins_without_bos_when_the_file_says_so(tmp_path: Path) -> None:
    assert convert(sentencepiece_gguf(tmp_path / "model.gguf", add_bos_token=False)).encode("hello")[0] != 1


def test_chat_template_is_taken_along(tmp_path: Path) -> None:
    ours = convert(sentencepiece_gguf(tmp_path / "model.gguf", chat_template=CHAT_TEMPLATE))
    expected = ours.encode("<s>user: hello</s><s>assistant: ")[1:]
    assert ours.encode_chat([{"role": "user", "content": "hello"}]) == expected


def test_no_token_is_added_beyond_the_vocabulary(tmp_path: Path) -> None:
    """transformers adds GPT-2's <|endoftext|> to a vocabulary that lacks it: an id that the model cannot embed."""
    ours = convert(byte_level_gguf(tmp_path / "model.gguf", "qwen2", eos_token_id=1))
    assert ours.vocab_size == 3 + len(LETTERS)


def test_user_defined_tokens_stay_whole_and_visible(tmp_path: Path) -> None:
    ours = convert(byte_level_gguf(tmp_path / "model.gguf", "qwen2"))
    assert pieces(ours, "a<think>a") == ["a", "<think>", "a"]


def test_llama3_begins_with_bos_unless_told_otherwise(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    assert convert(byte_level_gguf(path, "llama-bpe", bos_token_id=0)).encode("a")[0] == 0
    assert convert(byte_level_gguf(path, "llama-bpe", bos_token_id=0, add_bos_token=False)).encode("a")[0] != 0


def test_llama3_takes_words_of_the_vocabulary_whole(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    assert pieces(convert(byte_level_gguf(path, "llama-bpe")), "abc") == ["abc"]
    assert pieces(convert(byte_level_gguf(path, "qwen2")), "abc") == ["ab", "c"]


def test_unknown_pre_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"pre-tokenizer 'novel' in .* is not known: use the Hugging Face folder"):
        convert(byte_level_gguf(tmp_path / "model.gguf", "novel"))


def test_unsupported_kind_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", ["a"], [NORMAL], tokenizer_model="rwkv")
    with pytest.raises(ModelError, match=r"tokenizer 'rwkv' in .* is not supported \(only gpt2, llama\)"):
        convert(path)


def test_missing_merges_are_named(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", ["a"], [NORMAL], tokenizer_model="gpt2", tokenizer_pre="qwen2")
    with pytest.raises(ModelError, match=r"tokenizer\.ggml\.merges is missing"):
        convert(path)


@pytest.mark.parametrize("content", [b"", b"not a model", b"GGUF\x03\x00\x00\x00"])
def test_a_file_that_is_not_gguf_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=r"cannot read .*model\.gguf as GGUF"):
        convert(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"cannot read .*model\.gguf as GGUF"):
        convert(tmp_path / "model.gguf")
