"""Draft views with each sequence's first and latest keys (StreamingLLM; Xiao et al., 2023). A draft view selects the
keys that draft steps attend to.

Attention needs a text's first tokens (sinks) and its latest tokens; the keys between them are left out. Tokens keep
their true positions. If the KV is on the device, drafts read the keys in place. If the KV is in host memory, they read
a copy on the device (`generate_workers.residency.draft_window`). A round of drafts then copies only a few tokens over
the link, and only the step that verifies the drafts fetches all KV, so the output stays exact.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from torch import Tensor

from baton.modeling.forward.decoder import SequenceSpan
from baton.modeling.kv.buffers import KvPlace, KvRows
from baton.types import SlotId, TokenRange
from generate_workers.engine.rows import Row
from generate_workers.residency.host import HostResidency
from generate_workers.residency.port import DraftKeys, Residency, StepRows
from generate_workers.speculation.self_drafts import DraftStep


@dataclass(frozen=True)
class NarrowSpan:
    """SequenceSpan that leaves out a range of earlier keys, `unseen`. New tokens do not attend to these keys."""

    whole: SequenceSpan
    unseen: TokenRange

    @property
    def tokens(self) -> TokenRange:
        return self.whole.tokens

    def own(self, layer: int) -> Tensor:
        return self.whole.own(layer)

    def segments(self, layer: int) -> Iterator[KvRows]:
        for rows in self.whole.segments(layer):
            for part in (rows.slice(0, self.unseen.start), rows.slice(self.unseen.end, rows.end_position)):
                if len(part.k_SGH):
                    yield part

    def place(self) -> KvPlace | None:
        place = self.whole.place()
        return None if place is None else replace(place, unseen=self.unseen)


class StreamingView:
    """Draft view (selection of the keys that draft steps attend to): the first and latest keys of each sequence. Keys
    are read in place."""

    def __init__(self, residency: Residency, keys: DraftKeys) -> None:
        """`keys`: default numbers of first and latest keys. `begin` can set other numbers for single sequences."""
        self._residency = residency
        self._keys = keys
        self._keys_of: dict[SlotId, DraftKeys] = {}
        """Numbers of first and latest keys, by slot, of the sequences of the round that do not use the default."""

    def begin(self, rows: Sequence[Row], num_keys: Sequence[int] = ()) -> None:
        """Record the number of keys that each sequence attends to in this round. Any number is supported, because the
        view reads the sequences' own KV."""
        asked = zip(rows, num_keys, strict=False)
        self._keys_of = {row.slot: DraftKeys.of(num, self._keys.most_drafts) for row, num in asked if num}

    @contextmanager
    def step(self, rows: StepRows) -> Iterator[DraftStep]:
        """Prepare a draft step, which attends to the first and latest keys of each sequence. The latest keys include
        the key of the new token."""
        with self._residency.step(rows) as step:
            unseen = [self._unseen(slot, tokens) for slot, tokens in rows]
            spans = [NarrowSpan(span, keys) if keys else span for span, keys in zip(step.spans, unseen, strict=True)]
            yield DraftStep(spans, step.turns)

    def forget(self, row: Row) -> None:
        """Do nothing: `begin` replaces the state of all sequences in each round."""

    def _unseen(self, slot: SlotId, tokens: TokenRange) -> TokenRange:
        keys = self._keys_of.get(slot, self._keys)
        return TokenRange(keys.num_first, max(tokens.end - keys.num_last, keys.num_first))


class DraftWindowView:
    """Draft view (selection of the keys that draft steps attend to): the first and latest keys of each sequence. Draft
    steps read a copy of these keys on the device, which the HostResidency makes."""

    def __init__(self, residency: HostResidency) -> None:
        self._residency = residency

    def begin(self, rows: Sequence[Row], num_keys: Sequence[int] = ()) -> None:
        """Copy to the device the KV that the sequences' draft steps attend to, as far as it was not copied before.
        `num_keys` is ignored."""
        self._residency.follow((row.slot, row.num_cached) for row in rows)

    @contextmanager
    def step(self, rows: StepRows) -> Iterator[DraftStep]:
        """Prepare a draft step, which attends to the copies of keys on the device. The KV of the new tokens is written
        only to these copies, not to host memory."""
        yield DraftStep(self._residency.draft_spans(rows))

    def forget(self, row: Row) -> None:
        """Do nothing: the copies on the device are released together with the sequences' slots."""
