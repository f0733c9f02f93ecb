"""The index against a list for each store, from what was used longest ago to what was used last, of bounded length."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from orchestrator.placement.prefix_index import PrefixIndex

MAX_BLOCKS = 5
STORES = st.sampled_from(["a", "b"])
PATHS = st.text("xy", min_size=0, max_size=7)
"""A prompt: its blocks are named by its beginnings."""


def names(path: str) -> list[str]:
    return [path[: end + 1] for end in range(len(path))]


class BoundedIndex(RuleBasedStateMachine):
    """All rules say what they leave in the lists; the index must hold the same, and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(MAX_BLOCKS)
        self.held: dict[str, list[str]] = {"a": [], "b": []}

    @rule(store=STORES, path=PATHS)
    def use(self, store: str, path: str) -> None:
        """A prompt's first block is its warmest."""
        self.index.use(store, names(path))
        others = [name for name in self.held[store] if name not in names(path)]
        self.held[store] = [*others, *reversed(names(path))][-MAX_BLOCKS:]
        assert self.index.num_held(store, names(path)) == min(len(path), MAX_BLOCKS)

    @rule(store=STORES, path=PATHS)
    def hear(self, store: str, path: str) -> None:
        """What the store lists, the coldest first; what is known has been used since."""
        listed = list(reversed(names(path)))
        self.index.add(store, listed)
        num_fitting = max(0, MAX_BLOCKS - len(self.held[store]))
        fitting = listed[len(listed) - min(num_fitting, len(listed)) :]
        self.held[store] = [*(name for name in fitting if name not in self.held[store]), *self.held[store]]

    @rule(store=STORES, path=PATHS, first=st.integers(0, 6))
    def evict(self, store: str, path: str, first: int) -> None:
        self.index.forget(store, names(path)[first:])
        self.held[store] = [name for name in self.held[store] if name not in names(path)[first:]]

    @rule(store=STORES)
    def lose_others(self, store: str) -> None:
        self.index.keep_only([store])
        self.held = {each: held if each == store else [] for each, held in self.held.items()}

    @rule(store=STORES, path=PATHS)
    def ask(self, store: str, path: str) -> None:
        """Being asked about warms nothing."""
        missing = [index for index, name in enumerate(names(path)) if name not in self.held[store]]
        assert self.index.num_held(store, names(path)) == min(missing, default=len(path))

    @invariant()
    def holds_the_same(self) -> None:
        assert len(self.index) == sum(map(len, self.held.values()))
        for store, held in self.held.items():
            assert len(held) <= MAX_BLOCKS
            assert all(self.index.num_held(store, [name]) == 1 for name in held)


TestBoundedIndex = BoundedIndex.TestCase
TestBoundedIndex.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
