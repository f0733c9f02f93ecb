"""No text has fewer tokens than the bound says, by any tokenizer; and the bound says something of most texts."""

import gzip
from collections.abc import Callable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Core

from baton.text.token_bounds import token_bound
from baton.text.tokenizer import Tokenizer
from tests.support.folders import DATA
from tests.support.models.tiny_tokenizer import letter_tokenizer
from tests.support.models.tokenizers import sentencepiece_core

SPECIAL = "<mask>"


def byte_level(*, split: str = "isolated", num_merges: int = 6) -> Core:
    """All bytes but "q", and tokens of up to 2 ** `num_merges` spaces."""
    alphabet = [each for each in sorted(pre_tokenizers.ByteLevel.alphabet()) if each != "q"]
    merges = [("\u0120" * 2**power,) * 2 for power in range(num_merges)]
    tokens = [*alphabet, *(left + right for left, right in merges)]
    core = Core(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"[a-z]+"), behavior=split),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return core


def composing() -> Core:
    """Normalizes to NFC, as Qwen's tokenizers do, and knows all bytes."""
    core = byte_level()
    vocab = {token: index for index, token in enumerate([*sorted(pre_tokenizers.ByteLevel.alphabet())])}
    core.model = models.BPE(vocab=vocab, merges=[])
    core.normalizer = normalizers.NFC()
    return core


def swallowing() -> Core:
    """Has a special token that takes the whitespace on both of its sides."""
    core = byte_level()
    core.add_special_tokens([AddedToken(SPECIAL, lstrip=True, rstrip=True)])
    return core


def llama2() -> Core:
    """Rewrites spaces by a normalizer, and has no pre-tokenizer."""
    core = sentencepiece_core()
    core.pre_tokenizer = None
    core.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    return core


KNOWN: dict[str, Callable[[], Core]] = {
    "byte level": byte_level,
    "composing": composing,
    "swallowing": swallowing,
    "sentencepiece": sentencepiece_core,
    "llama2": llama2,
}


def replacing(old: str, new: str) -> Core:
    core = byte_level()
    core.normalizer = normalizers.Replace(old, new)
    return core


def without_byte_tokens() -> Core:
    core = sentencepiece_core()
    core.model = models.BPE(vocab={"a": 0, "<unk>": 1}, merges=[], byte_fallback=True, unk_token="<unk>")
    return core


def stripping() -> Core:
    core = byte_level()
    core.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Strip()])
    return core


def by_words() -> Core:
    core = sentencepiece_core()
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    return core


DROPPING: dict[str, Callable[[], Core]] = {
    "removes": lambda: byte_level(split="removed"),
    "shortens": lambda: replacing("  ", " "),
    "strips": stripping,
    "words": by_words,
    "no byte tokens": without_byte_tokens,
    "unknown words": lambda: letter_tokenizer()._core,
}

texts = st.one_of(
    st.text(),
    st.text(st.sampled_from([" ", "\t", "\u2003", "q", "a", "1", "\u0301", "\u1fef", "\u0390", "\U0001d15e"])),
    st.lists(st.sampled_from([" " * 64, SPECIAL, "q", "hello", "\u03b9\u0308\u0301", "\u2581"])).map("".join),
)


@pytest.mark.parametrize("name", KNOWN)
@given(text=texts)
@example(text=" " * 6400)
@example(text="q" * 1000)
@example(text=SPECIAL + " " * 1000 + SPECIAL)
@example(text="\u03b9\u0308\u0301" * 500)
@example(text="\u1fef" * 500)
@example(text="\U0002f82c" * 300)
def test_no_text_has_fewer_tokens(name: str, text: str) -> None:
    core = KNOWN[name]()
    bound = token_bound(core)
    assert bound is not None
    assert bound.min_tokens(text) <= len(core.encode(text, add_special_tokens=False).ids)


@given(text=texts)
@example(text="\x04\x06\x13\x14\x16\x1d" * 200)
@example(text="\U00040000" * 200)
@example(text="<|im_start|>" * 100)
def test_no_text_of_the_sample_model_has_fewer_tokens(smollm: Tokenizer, text: str) -> None:
    assert smollm.min_tokens(text) <= len(smollm.encode(text))


def test_the_longest_token_alone_reaches_the_bound(smollm: Tokenizer) -> None:
    vocab = smollm._core.get_vocab()
    longest = smollm.decode([vocab[max(vocab, key=len)]])
    assert (smollm.min_tokens(longest), len(smollm.encode(longest))) == (1, 1)
    assert smollm.min_tokens(longest + "a") == 2


def test_natural_text_is_within_a_factor(smollm: Tokenizer) -> None:
    text = gzip.decompress((DATA / "persuasion.txt.gz").read_bytes()).decode()
    assert len(smollm.encode(text)) < 25 * smollm.min_tokens(text)


def test_a_word_of_megabytes_is_over_the_limit_of_its_model(smollm: Tokenizer) -> None:
    assert smollm.min_tokens("a" * (7 * 2**20)) > 8192


@pytest.mark.parametrize("name", DROPPING)
def test_nothing_is_said_of_a_tokenizer_that_may_drop_text(name: str) -> None:
    assert token_bound(DROPPING[name]()) is None


def test_a_tokenizer_of_which_nothing_is_known_refuses_nothing() -> None:
    assert letter_tokenizer().min_tokens("a" * 10**6) == 0
