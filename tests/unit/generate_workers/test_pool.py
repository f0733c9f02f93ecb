"""The pool of a row's KV, against lists and dictionaries: who goes, who stays, and that a place is one token's."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.errors import ConfigError
from baton.types import TokenRange
from generate_workers.residency.pool import NOWHERE, Eviction, KvPool, PoolLimit

NUM_HEADS = 2


@dataclass
class Kept:
    """A token that the reference keeps."""

    position: int
    came_first: int
    picked_last: int
    count: int = 0


@dataclass
class ReferenceHead:
    """One kv head's part of a pool, as the paper's words have it: a list of tokens, each in its place."""

    limit: PoolLimit
    places: list[Kept] = field(default_factory=list)

    def pick(self, places: list[int], step: int) -> None:
        for place in places:
            self.places[place].picked_last = step
            self.places[place].count += 1
        if any(kept.count >= self.limit.most_count for kept in self.places):
            for kept in self.places:
                kept.count //= 2

    def append(self, position: int) -> int:
        new = Kept(position, position, position)
        if len(self.places) < self.limit.num_places:
            self.places.append(new)
            return len(self.places) - 1
        may_go = [
            (self._rank(kept), kept.position, place)
            for place, kept in enumerate(self.places)
            if self.limit.num_first <= kept.position <= position - self.limit.num_last
        ]
        place = min(may_go)[2]
        self.places[place] = new
        return place

    def _rank(self, kept: Kept) -> int:
        return {
            Eviction.FIFO: kept.came_first,
            Eviction.LRU: kept.picked_last,
            Eviction.COUNTER: kept.count,
        }[self.limit.eviction]


limits = st.builds(
    lambda first, last, more, eviction, most: PoolLimit(first + last + more, eviction, first, last, most),
    st.integers(0, 3),
    st.integers(1, 4),
    st.integers(0, 8),
    st.sampled_from(Eviction),
    st.integers(2, 5),
)


def padded(lists: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Lists of picks as the pool takes them; what is behind a list's end is no place at all."""
    longest = max(map(len, lists))
    rows = [each + [10**6] * (longest - len(each)) for each in lists]
    return np.array(rows, np.int32).reshape(len(lists), longest), np.array([len(each) for each in lists], np.int32)


@settings(max_examples=200, deadline=None)
@given(limits, st.integers(0, 30), st.integers(1, 40), st.data())
def test_a_random_trace_is_that_of_lists(
    limit: PoolLimit, num_prompt: int, num_steps: int, data: st.DataObject
) -> None:
    """Also: never more than the limit, no token twice, the first and the latest always there."""
    pool = KvPool(NUM_HEADS, limit)
    heads = [ReferenceHead(limit) for _ in range(NUM_HEADS)]
    for position in range(num_prompt):
        for head in heads:
            head.append(position)
    pool.fill(num_prompt)
    for position in range(num_prompt, num_prompt + num_steps):
        check_same(pool, heads)
        picks = [sorted(data.draw(st.sets(st.integers(0, pool.num_kept - 1)))) if pool.num_kept else [] for _ in heads]
        pool.pick(*padded(picks))
        for head, picked in zip(heads, picks, strict=True):
            head.pick(picked, position)
        assert pool.append().tolist() == [head.append(position) for head in heads]
    check_same(pool, heads)


def check_same(pool: KvPool, heads: list[ReferenceHead]) -> None:
    limit, num_tokens = pool.limit, pool.num_tokens
    for head, positions_P, latest_R in zip(heads, pool.positions_GP, pool.latest(), strict=True):
        held = positions_P[: pool.num_kept].tolist()
        assert held == [kept.position for kept in head.places]
        assert set(positions_P[pool.num_kept :].tolist()) <= {NOWHERE}
        assert len(set(held)) == len(held) == min(num_tokens, limit.num_places)
        assert [held[place] for place in pool.first] == list(range(min(limit.num_first, num_tokens)))
        recent = range(max(num_tokens - limit.num_last, 0), num_tokens)
        assert {held[place] for place in latest_R} == set(recent)


@settings(max_examples=100, deadline=None)
@given(limits, st.integers(0, 40))
def test_a_prompt_is_filled_as_if_its_tokens_came_one_by_one(limit: PoolLimit, num_prompt: int) -> None:
    filled, appended = KvPool(NUM_HEADS, limit), KvPool(NUM_HEADS, limit)
    filled.fill(num_prompt)
    for _ in range(num_prompt):
        appended.append()
    assert filled.positions_GP.tolist() == appended.positions_GP.tolist()
    assert sorted(filled.latest()[0]) == sorted(appended.latest()[0])
    assert [filled.append().tolist() for _ in range(20)] == [appended.append().tolist() for _ in range(20)]


@settings(max_examples=100, deadline=None)
@given(limits, st.integers(1, 40), st.data())
def test_a_prompt_that_is_pushed_in_pieces_is_the_same_in_any_order(
    limit: PoolLimit, num_prompt: int, data: st.DataObject
) -> None:
    memory = np.full(limit.num_places, NOWHERE)
    pieces = TokenRange(0, num_prompt).split(data.draw(st.integers(1, num_prompt)))
    for piece in data.draw(st.permutations(pieces)):
        for position, place in zip(range(piece.start, piece.end), limit.prompt_places(piece, num_prompt), strict=True):
            if place != NOWHERE:
                assert memory[place] == NOWHERE  # nothing is overwritten: the limit holds while the prompt comes
                memory[place] = position
    pool = KvPool(1, limit)
    pool.fill(num_prompt)
    assert memory.tolist() == pool.positions_GP[0].tolist()


@pytest.mark.parametrize(("eviction", "gone"), [(Eviction.FIFO, 1), (Eviction.LRU, 2), (Eviction.COUNTER, 3)])
def test_each_way_has_its_own_victim(eviction: Eviction, gone: int) -> None:
    pool = KvPool(1, PoolLimit(6, eviction, num_first=1, num_last=2))
    pool.fill(4)
    places = np.empty(0, np.int32)
    for picked in ([1, 2], [2], [1, 3, 4]):  # while there is room, places are positions
        pool.pick(*padded([picked]))
        places = pool.append()
    assert places.tolist() == [gone]


def test_counters_are_halved_by_the_one_that_is_full() -> None:
    """Three picks fill the first token's counter: of counts 3 and 1 one and none are left, and one more pick of the
    other makes them equal; without halving it would be 3 to 2, and the later token would go."""
    pool = KvPool(1, PoolLimit(4, Eviction.COUNTER, num_first=0, num_last=3, most_count=3))
    pool.fill(4)
    for picked in ([0, 1], [0], [0], [1]):
        pool.pick(*padded([picked]))
    assert pool.append().tolist() == [0]


def test_a_copy_goes_on_alike_and_a_cleared_pool_begins_anew() -> None:
    limit = PoolLimit(5, Eviction.LRU, num_first=1, num_last=2)
    source, target = KvPool(1, limit), KvPool(1, limit)
    source.fill(7)
    source.pick(*padded([[3]]))
    target.copy_from(source)
    assert [source.append().tolist() for _ in range(9)] == [target.append().tolist() for _ in range(9)]
    target.clear()
    target.fill(3)
    assert (target.num_kept, target.positions_GP[0].tolist()) == (3, [0, 1, 2, NOWHERE, NOWHERE])
    assert [target.append().tolist() for _ in range(2)] == [[3], [4]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_first": -1}, "num_first = -1 is out of range: use 0 or more"),
        ({"num_last": 0}, "num_last = 0 is out of range: a new token must stay, use 1 or more"),
        ({"num_places": 19}, r"num_places = 19 holds less than num_first \+ num_last = 20 tokens: raise it"),
        ({"most_count": 1}, "most_count = 1 is out of range: half of it must count, use 2 or more"),
    ],
)
def test_a_limit_that_cannot_be_kept_is_a_config_error(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PoolLimit(**{"num_places": 100, **changes})


def test_bytes_are_whole_places() -> None:
    assert PoolLimit.within(100 * 384 + 383, 384).num_places == 100
    with pytest.raises(ConfigError, match="num_places = 1 holds less"):
        PoolLimit.within(500, 384)
