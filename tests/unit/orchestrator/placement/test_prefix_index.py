"""The index against a plain model: for each store, which beginnings of prompts it was said to hold."""

import itertools
from collections.abc import Sequence

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from baton.prefix_blocks import PromptBlocks
from orchestrator.placement.prefix_index import PrefixIndex

BLOCK = 2
STORES = st.sampled_from(["a", "b", "c"])
PROMPTS = st.lists(st.integers(0, 1), min_size=0, max_size=9).map(tuple)


def names(token_ids: Sequence[int]) -> tuple[str, ...]:
    return PromptBlocks.of(token_ids, BLOCK, "layout").names


def beginnings(token_ids: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Ends of a prompt's whole blocks, as the tokens up to there."""
    return [token_ids[:end] for end in range(BLOCK, len(token_ids) + 1, BLOCK)]


class IndexMachine(RuleBasedStateMachine):
    """What each store holds, as sets of token tuples."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex()
        self.held: dict[str, set[tuple[int, ...]]] = {}

    @rule(store=STORES, token_ids=PROMPTS, num_blocks=st.integers(0, 4))
    def use(self, store: str, token_ids: tuple[int, ...], num_blocks: int) -> None:
        self.index.use(store, names(token_ids)[:num_blocks])
        self.held.setdefault(store, set()).update(beginnings(token_ids)[:num_blocks])

    @rule(store=STORES, prompts=st.lists(PROMPTS, max_size=3))
    def hear(self, store: str, prompts: list[tuple[int, ...]]) -> None:
        """What the store lists, its blocks' ends first."""
        self.index.add(store, [name for token_ids in prompts for name in reversed(names(token_ids))])
        self.held.setdefault(store, set()).update(end for token_ids in prompts for end in beginnings(token_ids))

    @rule(store=STORES, token_ids=PROMPTS, first=st.integers(0, 4))
    def evict(self, store: str, token_ids: tuple[int, ...], first: int) -> None:
        """Any blocks, also such as nobody knew."""
        self.index.forget(store, names(token_ids)[first:])
        self.held.get(store, set()).difference_update(beginnings(token_ids)[first:])

    @rule(stores=st.sets(STORES))
    def lose_others(self, stores: set[str]) -> None:
        self.index.keep_only(stores)
        self.held = {store: held for store, held in self.held.items() if store in stores}

    @rule(store=STORES, token_ids=PROMPTS)
    def ask(self, store: str, token_ids: tuple[int, ...]) -> None:
        held = self.held.get(store, set())
        expected = len(list(itertools.takewhile(held.__contains__, beginnings(token_ids))))
        assert self.index.num_held(store, names(token_ids)) == expected

    @invariant()
    def counts_all(self) -> None:
        assert len(self.index) == sum(map(len, self.held.values()))


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(max_examples=100, stateful_step_count=30)


def test_beyond_the_bound_the_coldest_leaves_go() -> None:
    index = PrefixIndex(max_blocks=4)
    old, new = names((0, 0, 0, 0, 0, 0)), names((1, 1, 1, 1))
    index.use("a", old)
    index.use("a", new)
    assert (len(index), index.num_held("a", old), index.num_held("a", new)) == (4, 2, 2)
    index.use("a", old[:1])
    index.use("a", names((1, 1, 1, 1, 1, 1, 0, 0))[:4])
    assert index.num_held("a", old) == 0
    assert index.num_held("a", names((1, 1, 1, 1, 1, 1, 0, 0))) == 4


def test_what_a_store_lists_is_colder_than_what_was_used_here_and_as_much_as_fits() -> None:
    index = PrefixIndex(max_blocks=3)
    used, warm, lukewarm, cold = names((0, 0)), names((0, 1)), names((1, 0)), names((1, 1))
    index.use("a", used)
    index.add("a", [*cold, *used, *lukewarm, *warm])
    assert [index.num_held("a", each) for each in (used, warm, lukewarm, cold)] == [1, 1, 1, 0]
    index.use("a", cold)
    assert [index.num_held("a", each) for each in (used, warm, lukewarm, cold)] == [1, 1, 0, 1]


def test_all_holders_of_a_block_are_known() -> None:
    index, blocks = PrefixIndex(), names((0, 0))
    assert index.holders(blocks[0]) == []
    index.use("a", blocks)
    index.use("b", blocks)
    index.forget("a", blocks)
    assert index.holders(blocks[0]) == ["b"]


def test_each_store_has_its_own_bound() -> None:
    index = PrefixIndex(max_blocks=2)
    for store in ("a", "b"):
        index.use(store, names((0, 0, 0, 0)))
    assert len(index) == 4


def test_to_be_considered_is_not_to_be_used() -> None:
    index = PrefixIndex(max_blocks=2)
    one, other, third = names((0, 0)), names((1, 1)), names((0, 1))
    index.use("a", one)
    index.use("a", other)
    assert index.num_held("a", one) == 1
    index.use("a", third)
    assert (index.num_held("a", one), index.num_held("a", other)) == (0, 1)


def test_no_store_holds_nothing() -> None:
    index = PrefixIndex()
    index.use("", names((0, 0)))
    assert (len(index), index.num_held("", names((0, 0)))) == (0, 0)
