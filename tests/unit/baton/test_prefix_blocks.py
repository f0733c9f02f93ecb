"""Names of blocks: equal exactly for equal beginnings, equal models and equal salts, in every process."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.prefix_blocks import PromptBlocks

pytestmark = pytest.mark.integration

TOKENS = st.lists(st.integers(0, 2), max_size=9)


def names(
    token_ids: list[int] | tuple[int, ...], block_tokens: int = 2, layout: str = "l", salt: str = ""
) -> list[str]:
    return list(PromptBlocks.of(token_ids, block_tokens, layout, salt).names)


@given(TOKENS, TOKENS, st.integers(1, 4))
def test_as_many_names_are_equal_as_whole_blocks_are(one: list[int], other: list[int], block_tokens: int) -> None:
    num_equal = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    first, second = names(one, block_tokens), names(other, block_tokens)
    assert len(first) == len(one) // block_tokens
    shared = num_equal // block_tokens
    assert first[:shared] == second[:shared]
    assert not set(first[shared:]) & set(second[shared:])


def test_the_same_tokens_later_in_a_prompt_are_another_block() -> None:
    assert len(set(names([1, 2, 1, 2, 1, 2]))) == 3


def test_another_model_or_salt_shares_nothing() -> None:
    ids = [1, 2, 3, 4]
    several = [names(ids), names(ids, layout="m"), names(ids, salt="s"), names(ids, salt="t"), names(ids, layout="ls")]
    assert len({name for each in several for name in each}) == 10
    assert names(ids, layout="l", salt="s") != names(ids, layout="ls", salt="")


def test_names_are_the_same_in_another_process() -> None:
    program = "from baton.prefix_blocks import PromptBlocks; print(*PromptBlocks.of(range(9), 4, 'l', 's').names)"
    run = subprocess.run([sys.executable, "-c", program], text=True, capture_output=True, check=True)
    assert run.stdout.split() == names(tuple(range(9)), 4, "l", "s")


@pytest.mark.parametrize(
    ("num_tokens", "num_blocks", "cached"), [(12, 3, 8), (13, 3, 12), (12, 1, 4), (4, 1, 0), (3, 0, 0)]
)
def test_somebody_computes_the_last_token(num_tokens: int, num_blocks: int, cached: int) -> None:
    blocks = PromptBlocks.of(range(num_tokens), 4, "l")
    assert blocks.cached_tokens(num_blocks) == cached
    assert blocks.cached(cached) + blocks.kept(cached) == blocks.names
    assert len(blocks.cached(cached)) == cached // 4
