"""Steps of rows: what is done when a forward ends well, what when it fails."""

import pytest

from baton.modeling.kv.row_memory import PagedMemory
from baton.types import SlotId, TokenRange
from generate_workers.residency.row_parts import PagedKv, StoredRow
from generate_workers.residency.steps import RowResidency, RowStep
from tests.support.engines.infinigen import LAYOUT

NEW = [(SlotId(0), TokenRange(0, 3))]


class NotedStep(RowStep[StoredRow]):
    """Notes what it is told, and copies ten bytes."""

    def __init__(self, notes: list[str], rows: list[tuple[StoredRow, TokenRange]]) -> None:
        super().__init__(rows, num_bytes_read=0)
        self.num_link_bytes = 10
        self._notes = notes

    def settle(self) -> None:
        self._notes.append("settled")

    def leave(self) -> None:
        self._notes.append("left")


class NotedResidency(RowResidency[StoredRow]):
    """One slot, whose steps are noted."""

    def __init__(self, notes: list[str]) -> None:
        kv = PagedKv(LAYOUT, PagedMemory, 8)
        super().__init__([StoredRow([kv], [kv])], lambda rows: NotedStep(notes, list(rows)))


@pytest.fixture
def notes() -> list[str]:
    return []


@pytest.fixture
def residency(notes: list[str]) -> NotedResidency:
    made = NotedResidency(notes)
    made.open(SlotId(0), 3, 8)
    return made


def test_a_step_that_ends_well_is_settled_then_left(residency: NotedResidency, notes: list[str]) -> None:
    with residency.step(NEW) as step:
        assert [span.tokens for span in step.spans] == [TokenRange(0, 3)]
        assert notes == []
    assert notes == ["settled", "left"]
    assert residency.num_link_bytes == 10


def test_a_step_whose_forward_failed_is_only_left(residency: NotedResidency, notes: list[str]) -> None:
    with pytest.raises(ValueError, match="forward"), residency.step(NEW):
        raise ValueError("forward")
    assert notes == ["left"]
    assert residency.num_link_bytes == 10


def test_new_tokens_have_memory_within_a_step(residency: NotedResidency) -> None:
    with residency.step(NEW):
        assert residency._rows[0].num_bytes == residency.bytes_for(3)
