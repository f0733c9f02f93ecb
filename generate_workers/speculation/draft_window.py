"""Draft view for KV in host memory: drafts attend to a copy of each sequence's first and latest keys on the device. The
drafts of a round copy only a few tokens over the link, and the step that verifies all of the drafts fetches all KV
once. So the output stays exact with fewer copied bytes per token (`generate_workers.residency.draft_window`).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from generate_workers.engine.rows import Row
from generate_workers.residency.host import HostResidency
from generate_workers.residency.port import StepRows
from generate_workers.speculation.self_drafts import DraftStep


class DraftWindowView:
    """DraftView of the copies that a HostResidency keeps."""

    def __init__(self, residency: HostResidency) -> None:
        self._residency = residency

    def begin(self, rows: Sequence[Row], num_keys: Sequence[int] = ()) -> None:
        """Bring the sequences' copies up to date."""
        self._residency.follow((row.slot, row.num_cached) for row in rows)

    @contextmanager
    def step(self, rows: StepRows) -> Iterator[DraftStep]:
        """Prepare a forward pass over the copies. The new tokens' KV is written only to the copies."""
        yield DraftStep(self._residency.draft_spans(rows))

    def forget(self, row: Row) -> None:
        """Do nothing: copies are released with the slots' claims."""
