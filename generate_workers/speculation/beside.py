"""A draft view of rows whose KV lives at home: their first and latest keys, in a copy on the device.

So the drafts of a round cost the link a few tokens, and the step that verifies reads all KV once for all of them: exact
output at a part of the bytes (`generate_workers.residency.beside`).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from generate_workers.engine.rows import Row
from generate_workers.residency.host import HostResidency
from generate_workers.residency.port import StepRows
from generate_workers.speculation.self_drafts import DraftStep


class BesideView:
    """A DraftView of the copies that a HostResidency keeps."""

    def __init__(self, residency: HostResidency) -> None:
        self._residency = residency

    def begin(self, rows: Sequence[Row], num_keys: Sequence[int] = ()) -> None:
        """Bring the rows' copies up to date."""
        self._residency.follow((row.slot, row.num_cached) for row in rows)

    @contextmanager
    def step(self, rows: StepRows) -> Iterator[DraftStep]:
        """Prepare a forward over the copies; the new tokens' KV goes there only."""
        yield DraftStep(self._residency.draft_spans(rows))

    def forget(self, row: Row) -> None:
        """Do nothing: copies go with the slots' claims."""
