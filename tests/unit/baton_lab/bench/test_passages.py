"""Passages of a text: about as long as wanted, and none begins like another."""

import gzip
from pathlib import Path

import pytest

from baton.errors import ConfigError, InvalidArgumentError
from baton_lab.bench.passages import NOVEL, Passages, read_words
from tests.support.folders import ROOT


def test_the_bundled_novel_is_the_one_of_the_tests() -> None:
    assert NOVEL.read_bytes() == (ROOT / "tests/data/emma.txt.gz").read_bytes()


def test_passages_of_the_novel_begin_unlike_each_other_and_are_the_same_for_the_same_seed() -> None:
    words = read_words(NOVEL)
    first, again, other = (Passages(words, seed) for seed in (1, 1, 2))
    taken = [first.take(20) for _ in range(2000)]
    assert len({" ".join(text.split()[:8]) for text in taken}) == 2000
    assert [again.take(20) for _ in range(2000)] == taken
    assert [other.take(20) for _ in range(2000)] != taken


def test_a_passage_has_as_many_tokens_as_wanted_by_the_servers_count() -> None:
    passages = Passages(read_words(NOVEL), 1)
    passages.tokens_per_word = 2.0
    assert len(passages.take(100).split()) == 50
    assert len(passages.take(1).split()) == 1


def test_a_passage_may_be_longer_than_the_text() -> None:
    words = [f"w{number}" for number in range(20)]
    passages = Passages(words, 3)
    passages.tokens_per_word = 1.0
    text = passages.take(50).split()
    assert len(text) == 50 and text[:20] == text[20:40] and sorted(text[:20]) == sorted(words)


def test_a_text_that_is_used_up_says_so() -> None:
    passages = Passages([f"w{number}" for number in range(12)], 1)
    for _ in range(12):
        passages.take(3)
    with pytest.raises(ConfigError, match="text of 12 words has no new passage left.*--repeat-prompts"):
        passages.take(3)


def test_beginnings_that_the_text_repeats_are_left_out() -> None:
    passages = Passages([*"abcdefghij", *"abcdefghij"], 1)
    assert len({passages.take(11) for _ in range(10)}) == 10
    with pytest.raises(ConfigError):
        passages.take(11)


def test_blocks_are_equal_for_equal_numbers_only() -> None:
    passages = Passages(read_words(NOVEL), 1)
    assert passages.of_block(0, 5, 512) == passages.of_block(0, 5, 512)
    others = [passages.of_block(0, 6, 512), passages.of_block(1, 5, 512)]
    assert passages.of_block(0, 5, 512) not in others and others[0] != others[1]


def test_texts_are_read_whole_or_compressed(tmp_path: Path) -> None:
    text = "one two three four five six seven eight nine ten"
    plain, packed = tmp_path / "text.txt", tmp_path / "text.gz"
    plain.write_text(text)
    packed.write_bytes(gzip.compress(text.encode()))
    assert read_words(plain) == read_words(packed) == text.split()


@pytest.mark.parametrize(("content", "complaint"), [(b"\xff\xfe", "cannot be read"), (b"few words", "only 2 words")])
def test_a_text_that_cannot_be_used_is_refused(tmp_path: Path, content: bytes, complaint: str) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(content)
    with pytest.raises(InvalidArgumentError, match=f"--text: .*{complaint}"):
        read_words(path)
    with pytest.raises(InvalidArgumentError, match="--text: .*cannot be read"):
        read_words(tmp_path / "absent.txt")
