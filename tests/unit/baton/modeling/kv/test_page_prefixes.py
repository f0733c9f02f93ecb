"""Cached blocks in pages: rows begin with what is there, and blocks give way to rows, the longest unused first."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.modeling.kv.page_prefixes import PagePrefixes
from baton.modeling.kv.pages import PagePool, RowPages
from baton.modeling.kv.pool_memory import MappedPool
from baton.types import KvLayout, TokenRange

LAYOUT = KvLayout("test", num_layers=2, num_kv_heads=1, head_dim=2, dtype="float32")
SIZE, BLOCK_PAGES, NUM_PAGES = 4, 2, 12
BLOCK = SIZE * BLOCK_PAGES
MOST_TOKENS = NUM_PAGES * SIZE


def make() -> tuple[PagePool, PagePrefixes]:
    pool = PagePool(MappedPool(LAYOUT, NUM_PAGES, SIZE))
    return pool, PagePrefixes(pool)


def row_of(pool: PagePool, num_tokens: int) -> RowPages:
    row = RowPages(pool, MOST_TOKENS)
    row.prepare(TokenRange(0, num_tokens), 0)
    return row


def keep(prefixes: PagePrefixes, row: RowPages, names: str) -> None:
    prefixes.keep(names, row.pages_of(TokenRange(0, len(names) * BLOCK)))


def test_a_row_begins_with_the_leading_blocks_that_are_there() -> None:
    pool, prefixes = make()
    row = row_of(pool, 2 * BLOCK)
    pages = row.pages_of(TokenRange(0, 2 * BLOCK))
    keep(prefixes, row, "ab")
    row.release()
    assert pool.num_taken == 4
    assert prefixes.begin("axb") == pages[:2]
    assert prefixes.begin("xb") == []
    assert prefixes.begin("abc") == pages
    assert prefixes.num_shared_blocks == 3


def test_blocks_give_way_to_rows_the_longest_unused_and_the_last_of_a_prompt_first() -> None:
    pool, prefixes = make()
    for names in ("ab", "cd", "ef"):
        row = row_of(pool, 2 * BLOCK)
        keep(prefixes, row, names)
        row.release()
    other = RowPages(pool, MOST_TOKENS)
    other.adopt(prefixes.begin("ab"))
    assert list(prefixes._blocks) == ["d", "c", "f", "e", "b", "a"]
    row_of(pool, 1)
    assert list(prefixes._blocks) == ["c", "f", "e", "b", "a"]
    row_of(pool, 3 * BLOCK + SIZE)
    assert list(prefixes._blocks) == ["b", "a"]
    with pytest.raises(MemoryError, match="1 pages are needed, and 0 of 12 are free"):
        row_of(pool, 1)  # the rest has a row, which would not give it back
    assert list(prefixes._blocks) == ["b", "a"]
    other.release()
    prefixes.close()
    assert pool.num_taken == 8


def test_nothing_is_kept_after_the_end() -> None:
    """Answers may still be saved when their engine has ended."""
    pool, prefixes = make()
    row = row_of(pool, 2 * BLOCK)
    keep(prefixes, row, "a")
    prefixes.close()
    keep(prefixes, row, "ab")
    row.release()
    assert pool.num_taken == 0
    assert prefixes.begin("ab") == []


def test_rows_and_blocks_together_keep_to_a_bound() -> None:
    pool, prefixes = make()
    pool.most_taken = 4
    row = row_of(pool, 2 * BLOCK)
    keep(prefixes, row, "ab")
    with pytest.raises(MemoryError, match="0 of 4 are free"):
        row_of(pool, 1)
    row.release()
    row_of(pool, BLOCK)
    assert (list(prefixes._blocks), pool.num_taken) == (["a"], 4)


TEXTS = st.text("ab", min_size=1, max_size=4)
ACTIONS = st.one_of(st.tuples(st.just("ask"), TEXTS), st.tuples(st.just("end"), st.just("")))


@given(st.lists(ACTIONS, max_size=40))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_blocks_hold_what_their_names_say(actions: list[tuple[str, str]]) -> None:
    """A prompt is a text; the name of its block is the text up to there, and so is what is written there."""
    pool, prefixes = make()
    rows: list[tuple[RowPages, str]] = []
    written: dict[int, str] = {}
    for action, text in actions:
        if action == "end":
            if rows:
                rows.pop(0)[0].release()
            continue
        names = [text[: end + 1] for end in range(len(text))]
        row = RowPages(pool, MOST_TOKENS)
        row.adopt(prefixes.begin(names))
        start = row.num_bytes // pool.page_bytes * SIZE
        tokens = TokenRange(start, len(text) * BLOCK)
        try:
            row.prepare(tokens, 0)
        except MemoryError:
            taken = {page for each, _ in rows for page in each._pages}
            assert len(taken | set(row._pages)) + len(tokens) // SIZE > NUM_PAGES, "blocks did not give way"
            row.release()
            continue
        for index, page in enumerate(row.pages_of(TokenRange(0, len(text) * BLOCK))):
            name = names[index // BLOCK_PAGES]
            if index >= start // SIZE:
                written[page] = name
            assert written[page] == name
        prefixes.keep(names, row.pages_of(TokenRange(0, len(text) * BLOCK)))
        rows.append((row, text))
        owners = Counter(page for each, _ in rows for page in each._pages)
        owners.update(page for pages in prefixes._blocks.values() for page in pages)
        assert pool._num_owners_P.tolist() == [owners[page] for page in range(NUM_PAGES)]
    for row, _ in rows:
        row.release()
    prefixes.close()
    assert pool.num_taken == 0
