"""Reference model of evictions from a KV pool. It follows the paper with plain lists of tokens. A check compares the
contents of a policy's sequences with these lists."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from baton.modeling.forward.selection import Picks
from baton.modeling.sparse.bases import Basis
from baton.types import TokenRange
from generate_workers.residency.sparse.infinigen_pooled import PooledInfinigenRow
from generate_workers.residency.sparse.pool import Eviction, PoolLimit
from tests.support.engines.infinigen import LAYERS, LAYOUT, partial_of
from tests.support.engines.selective import Bench, lists

NUM_HEADS = LAYOUT.num_kv_heads


@dataclass
class Kept:
    """A token that is kept in the pool."""

    position: int
    picked_last: int
    count: int = 0


@dataclass
class ReferenceList:
    """Tokens that one KV head keeps in one layer of one sequence."""

    limit: PoolLimit
    kept: list[Kept] = field(default_factory=list)
    num_tokens: int = 0
    closeness: Mapping[int, float] = field(default_factory=dict)
    """Scores of the kept tokens by position, in the step that appends the next token. Empty if the next token has no
    step of its own."""

    @property
    def positions(self) -> list[int]:
        """Return the positions of all kept tokens in ascending order."""
        return sorted(each.position for each in self.kept)

    def pick(self, positions: set[int], closeness: Mapping[int, float]) -> None:
        """Record that the next token attends to the kept tokens at `positions`. `closeness` holds the scores of all
        kept tokens."""
        assert positions <= closeness.keys() == {each.position for each in self.kept}
        self.closeness = closeness
        for each in self.kept:
            if each.position in positions:
                each.picked_last = self.num_tokens
                each.count += 1
        if any(each.count >= self.limit.most_count for each in self.kept):
            for each in self.kept:
                each.count //= 2

    def append(self, position: int, of_prompt: bool = False) -> None:
        """Append the next token, and evict another one if the pool is full. `of_prompt`: the token is part of a prompt,
        whose tokens are appended in one step."""
        assert position == self.num_tokens
        if len(self.kept) == self.limit.num_places:
            may_go = [
                each for each in self.kept if self.limit.num_first <= each.position <= position - self.limit.num_last
            ]
            self.kept.remove(min(may_go, key=self._rank))
        self.kept.append(Kept(position, picked_last=0 if of_prompt else position))
        self.num_tokens += 1
        self.closeness = {}

    def _rank(self, each: Kept) -> tuple[float, ...]:
        if self.limit.eviction is Eviction.FIFO:
            return (each.position,)
        mark = each.count if self.limit.eviction is Eviction.COUNTER else each.picked_last
        return mark, self.closeness.get(each.position, 0.0), each.position


def row_of(bench: Bench, slot: int) -> PooledInfinigenRow:
    """Return the sequence in a slot of a policy that uses pools."""
    row = bench.residency._rows[slot]  # type: ignore[attr-defined]
    assert isinstance(row, PooledInfinigenRow)
    return row


@dataclass
class Trace:
    """History of one slot's sequence: the exact K and V of every token, and the tokens that should be kept."""

    bench: Bench
    slot: int
    limit: PoolLimit
    truth: list[Tensor] = field(default_factory=list)
    """Exact K and V `[L, 2, G, H]` of each token."""
    has_begun: bool = False
    """True once a single token was appended, which ends the prompt."""

    def __post_init__(self) -> None:
        self.lists = [[ReferenceList(self.limit) for _ in range(NUM_HEADS)] for _ in LAYERS]

    def came(self, kv_LT2GH: Tensor) -> None:
        """Append new tokens in all layers that select keys. Tokens before the first single one belong to the prompt."""
        self.has_begun |= kv_LT2GH.shape[1] == 1
        for kv_L2GH in kv_LT2GH.unbind(1):
            for head in (head for heads in self.lists for head in heads):
                head.append(len(self.truth), of_prompt=not self.has_begun)
            self.truth.append(kv_L2GH)

    def check(self, basis: Basis) -> None:
        """Check that the pool of every KV head holds K, V and partial keys of exactly the tokens in its reference
        list."""
        row, num_tokens = row_of(self.bench, self.slot), len(self.truth)
        num_kept = min(num_tokens, self.limit.num_places)
        truth_LN2GH = torch.stack(self.truth, 1)
        for at, layer in enumerate(LAYERS):
            kv_P2GH = row.kv(layer, TokenRange(0, num_kept))
            k_PGR = row.partial.read(layer, num_kept)
            expected_NGR = partial_of(truth_LN2GH[at, :, 0], basis, layer)
            for head in range(NUM_HEADS):
                positions = self.positions(at, head, kv_P2GH[:, :, head])
                assert sorted(positions) == self.lists[at][head].positions
                torch.testing.assert_close(k_PGR[:, head], expected_NGR[positions, head], atol=1e-6, rtol=2**-7)

    def positions(self, at: int, head: int, kv_P2H: Tensor) -> list[int]:
        """Return the positions of the tokens whose K and V equal `kv_P2H` bit for bit."""
        known = {_bytes(kv_L2GH[at, :, head]): position for position, kv_L2GH in enumerate(self.truth)}
        assert len(known) == len(self.truth)
        return [known[_bytes(each)] for each in kv_P2H]

    def picked(self, at: int, picks: Picks, row: int, before: Tensor, closeness_GP: Tensor) -> None:
        """Record the keys that a step selected. They are given as places in the pool; the last one is the new token
        itself. `before` `[P, 2, G, H]` is the content of the places before the step."""
        for head, places in enumerate(lists(picks, row)):
            assert places[-1] == len(before)
            positions = self.positions(at, head, before[:, :, head])
            closeness = dict(zip(positions, closeness_GP[head].tolist(), strict=True))
            self.lists[at][head].pick({positions[place] for place in places[:-1]}, closeness)


def _bytes(kv_2H: Tensor) -> bytes:
    return kv_2H.contiguous().numpy().tobytes()
