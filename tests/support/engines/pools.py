"""Who stays in a pool of KV, told by lists of tokens, as the paper's words have it; and whether rows hold just that."""

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
    """A token that is kept."""

    position: int
    picked_last: int
    count: int = 0


@dataclass
class ReferenceList:
    """What one kv head keeps in one layer of one row."""

    limit: PoolLimit
    kept: list[Kept] = field(default_factory=list)
    num_tokens: int = 0
    closeness: Mapping[int, float] = field(default_factory=dict)
    """By position, in the step that brings the next token; empty: no step does."""

    @property
    def positions(self) -> list[int]:
        """Of all that is kept, ascending."""
        return sorted(each.position for each in self.kept)

    def pick(self, positions: set[int], closeness: Mapping[int, float]) -> None:
        """The next token attends to these, which are kept; `closeness`: of all that are kept."""
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
        """The next token comes; those of a prompt all at once."""
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
    """Of a policy on pools."""
    row = bench.residency._rows[slot]  # type: ignore[attr-defined]
    assert isinstance(row, PooledInfinigenRow)
    return row


@dataclass
class Trace:
    """What came to one slot's row: true K and V of every token, and the lists of what should be left of them."""

    bench: Bench
    slot: int
    limit: PoolLimit
    truth: list[Tensor] = field(default_factory=list)
    """`[L, 2, G, H]` of each token."""
    has_begun: bool = False
    """Whether a token came alone."""

    def __post_init__(self) -> None:
        self.lists = [[ReferenceList(self.limit) for _ in range(NUM_HEADS)] for _ in LAYERS]

    def came(self, kv_LT2GH: Tensor) -> None:
        """New tokens, in all layers that choose; those of a prompt before one comes alone."""
        self.has_begun |= kv_LT2GH.shape[1] == 1
        for kv_L2GH in kv_LT2GH.unbind(1):
            for head in (head for heads in self.lists for head in heads):
                head.append(len(self.truth), of_prompt=not self.has_begun)
            self.truth.append(kv_L2GH)

    def check(self, basis: Basis) -> None:
        """Every kv head's places hold K, V and partial keys of exactly what its list keeps."""
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
        """Of the tokens that these are, to the bit."""
        known = {_bytes(kv_L2GH[at, :, head]): position for position, kv_L2GH in enumerate(self.truth)}
        assert len(known) == len(self.truth)
        return [known[_bytes(each)] for each in kv_P2H]

    def picked(self, at: int, picks: Picks, row: int, before: Tensor, closeness_GP: Tensor) -> None:
        """By place, the own one last; `before`: `[P, 2, G, H]`, what lay in the places."""
        for head, places in enumerate(lists(picks, row)):
            assert places[-1] == len(before)
            positions = self.positions(at, head, before[:, :, head])
            closeness = dict(zip(positions, closeness_GP[head].tolist(), strict=True))
            self.lists[at][head].pick({positions[place] for place in places[:-1]}, closeness)


def _bytes(kv_2H: Tensor) -> bytes:
    return kv_2H.contiguous().numpy().tobytes()
