"""The pool of a row's KV, against lists and dictionaries: who goes, who stays, and that a place is one token's."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from baton.errors import ConfigError
from baton.modeling.forward.selection import Picks
from baton.types import TokenRange
from generate_workers.residency.sparse.pool import (
    Eviction,
    Integers,
    KvPool,
    KvPools,
    PoolLimit,
    PoolNotes,
)
from tests.support.engines.pools import ReferenceList

NUM_LAYERS, NUM_HEADS = 2, 2
NOTHING = -1

limits = st.builds(
    lambda first, last, more, eviction, most: PoolLimit(first + last + more, eviction, first, last, most),
    st.integers(0, 3),
    st.integers(1, 4),
    st.integers(0, 8),
    st.sampled_from(Eviction),
    st.integers(2, 5),
)


def positions_in(pool: KvPool, layer: int, num_tokens: int) -> Integers:
    """`[G, P]`: of the tokens that a row of so many keeps, by place, as their orders say."""
    num_kept = min(num_tokens, pool.limit.num_places)
    positions_GP: Integers = pool._orders_LGP[layer, :, :num_kept].astype(np.int64)
    return positions_GP & ((1 << pool.limit.position_bits) - 1)


@dataclass
class Traced:
    """A row: its pool, a memory in which every place holds a token's position, and what lists make of it."""

    limit: PoolLimit
    pools: KvPools
    slot: int
    num_tokens: int = 0
    heads: list[list[ReferenceList]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.memory_LGP = np.full((NUM_LAYERS, NUM_HEADS, self.limit.num_places + 1), NOTHING)
        self.heads = [[ReferenceList(self.limit) for _ in range(NUM_HEADS)] for _ in range(NUM_LAYERS)]

    @property
    def pool(self) -> KvPool:
        return self.pools[self.slot]

    def fill(self, pieces: list[TokenRange], num_tokens: int) -> None:
        """A prompt of so many tokens comes in these pieces."""
        for layer in range(NUM_LAYERS):
            for piece in pieces:
                positions_K, places_K = self.pool.take_prompt(layer, piece)
                assert len(set(places_K.tolist())) == len(places_K)
                self.memory_LGP[layer, :, places_K] = positions_K[:, None]
        sources, targets = self.pool.arrange(num_tokens)
        self.memory_LGP[:, :, targets] = self.memory_LGP[:, :, sources]
        for position in range(num_tokens):
            self._in_lists(position, of_prompt=True)
        self.num_tokens = num_tokens

    def pick(self, layer: int, places_G: list[set[int]], closeness_GP: Tensor) -> None:
        """The lists hear of positions."""
        for head, places in enumerate(places_G):
            positions = self.memory_LGP[layer, head, : min(self.num_tokens, self.limit.num_places)].tolist()
            closeness = dict(zip(positions, closeness_GP[head].tolist(), strict=False))
            self.heads[layer][head].pick({positions[place] for place in places}, closeness)

    def append(self, victims_LG: Integers | None = None) -> None:
        """The memory does what the pool says."""
        position, limit, memory_LGP = self.num_tokens, self.limit, self.memory_LGP
        memory_LGP[:, :, min(position, limit.num_places)] = position
        victims_LG = self.pool.append(position, victims_LG=victims_LG)
        if victims_LG is not None:
            leaving = limit.late_place(position) if limit.num_last > 1 else limit.num_places
            np.put_along_axis(memory_LGP, victims_LG[:, :, None], memory_LGP[:, :, leaving, None], axis=2)
            memory_LGP[:, :, leaving] = position if limit.num_last > 1 else NOTHING
        self._in_lists(position)
        self.num_tokens += 1

    def check(self) -> None:
        """Also: never more than the limit, no token twice, the first and the latest always there, and at their ends."""
        limit, num_tokens = self.limit, self.num_tokens
        num_kept = min(num_tokens, limit.num_places)
        for layer, heads in enumerate(self.heads):
            found_GP = positions_in(self.pool, layer, num_tokens)
            assert found_GP.tolist() == self.memory_LGP[layer, :, :num_kept].tolist()
            for head, held in zip(heads, found_GP.tolist(), strict=True):
                assert len(held) == num_kept
                assert sorted(held) == head.positions
                assert held[: limit.num_first] == list(range(min(limit.num_first, num_tokens)))
                num_latest = min(limit.num_last - 1, num_tokens)
                latest = held[len(held) - num_latest :]
                assert sorted(latest) == list(range(num_tokens - num_latest, num_tokens))

    def _in_lists(self, position: int, of_prompt: bool = False) -> None:
        for head in (head for heads in self.heads for head in heads):
            head.append(position, of_prompt)


def picks_of(rows: list[list[set[int]]]) -> Picks:
    """Picks of several rows in one layer; values behind a list's end are no places."""
    longest = max(len(places) for row in rows for places in row)
    lists = [[sorted(places) + [10**6] * (longest + 3 - len(places)) for places in row] for row in rows]
    counts = [[len(places) for places in row] for row in rows]
    return Picks(torch.tensor(lists, dtype=torch.int32), torch.tensor(counts, dtype=torch.int32))


@pytest.mark.ci
@settings(max_examples=200, deadline=None)
@given(limits, st.tuples(st.integers(0, 30), st.integers(0, 30)), st.integers(1, 40), st.randoms(use_true_random=False))
def test_a_random_trace_is_that_of_lists(
    limit: PoolLimit, num_prompts: tuple[int, int], num_steps: int, random: Any
) -> None:
    """Of two rows, which are told in one call what they pick, and in a slot that had another row before; many keys are
    equally close."""
    pools = KvPools(3, NUM_LAYERS, NUM_HEADS, limit)
    before = Traced(limit, pools, 2)
    before.fill([TokenRange(0, 40)], 40)
    before.append()
    pools.clear(2)
    rows = [Traced(limit, pools, slot) for slot in (2, 0)]
    for row, num_prompt in zip(rows, num_prompts, strict=True):
        row.fill([TokenRange(0, num_prompt)] if num_prompt else [], num_prompt)
    for _ in range(num_steps):
        for row in rows:
            row.check()
        step(rows, [[[drawn(row, random) for _ in range(NUM_HEADS)] for row in rows] for _ in range(NUM_LAYERS)])
    for row in rows:
        row.check()


def step(rows: list[Traced], places_LBG: list[list[list[set[int]]]]) -> None:
    """The next token of each row, which attends to what lies in these places, and to itself; beside a row whose pool
    hears nothing."""
    limit = rows[0].limit
    notes = None
    if limit.eviction is not Eviction.FIFO:
        positions = [99, *(row.num_tokens for row in rows)]
        notes = PoolNotes(rows[0].pools, [None, *(row.slot for row in rows)], positions)
    generator = torch.Generator().manual_seed(rows[0].num_tokens)
    for layer, places_BG in enumerate(places_LBG):
        closeness_BGP = -torch.randint(0, 4, (1 + len(rows), NUM_HEADS, limit.num_places), generator=generator).float()
        own = [
            [places | {min(row.num_tokens, limit.num_places)} for places in places_G]
            for row, places_G in zip(rows, places_BG, strict=True)
        ]
        if notes is not None:
            notes.note(layer, picks_of([[{0}] * NUM_HEADS, *own]), closeness_BGP)
        for row, places_G, closeness_GP in zip(rows, places_BG, closeness_BGP[1:], strict=True):
            row.pick(layer, places_G, closeness_GP)
    victims = [None] * (1 + len(rows)) if notes is None else notes.victims()
    for row, victims_LG in zip(rows, victims[1:], strict=True):
        row.append(victims_LG)


def drawn(row: Traced, random: Any) -> set[int]:
    num_kept = min(row.num_tokens, row.limit.num_places)
    return set(random.sample(range(num_kept), random.randint(0, num_kept)))


@settings(max_examples=100, deadline=None)
@given(limits, st.integers(1, 40), st.data())
def test_a_prompt_that_is_pushed_in_pieces_is_the_same_in_any_order(
    limit: PoolLimit, num_prompt: int, data: st.DataObject
) -> None:
    row = Traced(limit, KvPools(1, NUM_LAYERS, NUM_HEADS, limit), 0)
    pieces = TokenRange(0, num_prompt).split(data.draw(st.integers(1, num_prompt)))
    row.fill(data.draw(st.permutations(pieces)), num_prompt)
    row.check()
    for _ in range(20):
        row.append()
        row.check()


@pytest.mark.parametrize(("eviction", "gone"), [(Eviction.FIFO, 1), (Eviction.LRU, 2), (Eviction.COUNTER, 3)])
def test_each_way_has_its_own_victim(eviction: Eviction, gone: int) -> None:
    row = alone(PoolLimit(6, eviction, num_first=1, num_last=2), num_prompt=4)
    for picked in ({1, 2}, {2, 4}, {1, 3, 4}):  # while there is room, places are positions
        step([row], [[[picked] * NUM_HEADS]] * NUM_LAYERS)
    assert gone_of(row) == [gone]


@pytest.mark.parametrize("eviction", [Eviction.LRU, Eviction.COUNTER])
def test_of_a_prompt_whose_tokens_nobody_picked_the_farthest_goes(eviction: Eviction) -> None:
    limit = PoolLimit(8, eviction, num_first=1, num_last=2)
    row = alone(limit, num_prompt=8)
    closeness_BGP = torch.tensor([[[-9.0, 0.0, -3.0, -5.0, -1.0, -5.0, -2.0, -9.0]] * NUM_HEADS])
    victims_LG = noted(row, {1, 8}, closeness_BGP)
    assert victims_LG.tolist() == [[3] * NUM_HEADS] * NUM_LAYERS  # of two that are equally far, the earlier


def test_counters_are_halved_by_the_one_that_is_full() -> None:
    """Three picks fill the first token's counter: of counts 3 and 1 one and none are left, and one more pick of the
    other makes them equal; without halving it would be 3 to 2, and the later token would go."""
    row = alone(PoolLimit(4, Eviction.COUNTER, num_first=0, num_last=3, most_count=3), num_prompt=4)
    closeness_BGP = torch.zeros(1, NUM_HEADS, 4)
    for picked in ({0, 1}, {0}, {0}):
        noted(row, picked, closeness_BGP)
    row.append(noted(row, {1}, closeness_BGP))
    assert gone_of(row) == [0]


def test_a_copy_goes_on_alike() -> None:
    limit = PoolLimit(5, Eviction.LRU, num_first=1, num_last=2)
    pools = KvPools(2, NUM_LAYERS, NUM_HEADS, limit)
    source = Traced(limit, pools, 0)
    source.fill([TokenRange(0, 7)], 7)
    step([source], [[[{3}] * NUM_HEADS]] * NUM_LAYERS)
    pools[1].copy_from(pools[0])
    for position in range(8, 17):
        victims_LG, copied_LG = (pool.append(position) for pool in (pools[0], pools[1]))
        assert victims_LG is not None and copied_LG is not None
        assert victims_LG.tolist() == copied_LG.tolist()


def alone(limit: PoolLimit, num_prompt: int) -> Traced:
    row = Traced(limit, KvPools(1, NUM_LAYERS, NUM_HEADS, limit), 0)
    row.fill([TokenRange(0, num_prompt)], num_prompt)
    return row


def noted(row: Traced, places: set[int], closeness_BGP: Tensor) -> Integers:
    """The only row attends to these in all lists; whom that makes victims."""
    notes = PoolNotes(row.pools, [0], [row.num_tokens])
    for layer in range(NUM_LAYERS):
        notes.note(layer, picks_of([[places] * NUM_HEADS]), closeness_BGP)
    (victims_LG,) = notes.victims()
    assert victims_LG is not None
    return victims_LG


def gone_of(row: Traced) -> list[int]:
    """Positions that the first list has dropped; the others are alike."""
    positions = positions_in(row.pool, 0, row.num_tokens)[0]
    return sorted({*range(row.num_tokens)} - {*positions.tolist()})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_first": -1}, "num_first = -1 is out of range: use 0 or more"),
        ({"num_last": 0}, "num_last = 0 is out of range: a new token must stay, use 1 or more"),
        (
            {"num_places": 19},
            r"pool_tokens = 19 has no room for the 4 first and the 16 latest, .*: use 20 or more, or 0",
        ),
        ({"most_count": 1}, "most_count = 1 is out of range: use 2, of which half counts, to 255"),
    ],
)
def test_a_limit_that_cannot_be_kept_is_a_config_error(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PoolLimit(**{"num_places": 100, **changes})
