"""The protocol of leases holds for any order, loss and repetition of messages. The state machine that shows this finds
each of five planted faults."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from baton.transport import reserve_book
from baton.transport.reserve_book import ReserveBook
from baton.transport.terms import SeenTerms
from baton.types import ReserveNumber
from generate_workers.slots.leases import Slot, SlotState
from tests.support.links.lease_protocol import LeaseProtocol

Plant = Callable[[pytest.MonkeyPatch], None]
UNTIMED = settings(stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck))
QUICK = settings(UNTIMED, max_examples=40, derandomize=True)
THOROUGH = settings(UNTIMED, max_examples=800)


def forget_soon(patch: pytest.MonkeyPatch) -> None:
    """Aborted numbers are remembered for a shorter time than a Reserve call is under way."""
    patch.setattr(reserve_book, "REMEMBER_S", 1.0)


def grant_twice(patch: pytest.MonkeyPatch) -> None:
    """A Reserve call that arrives twice gets two leases."""
    grant = ReserveBook.grant

    async def granted(self: ReserveBook, number: ReserveNumber, *how: Any) -> Any:
        known = self._known.get(number)
        if known is not None and known.lease is not None:
            del self._known[number]
        return await grant(self, number, *how)

    patch.setattr(ReserveBook, "grant", granted)


def miss_running_calls(patch: pytest.MonkeyPatch) -> None:
    """An abort does not reach a Reserve call that is running."""
    abort = ReserveBook.abort

    def aborted(self: ReserveBook, number: ReserveNumber) -> Any:
        running = self._known.get(number)
        found = abort(self, number)
        if running is not None and running.lease is None:
            running.is_aborted = False
        return found

    patch.setattr(ReserveBook, "abort", aborted)


def keep_committed_leases(patch: pytest.MonkeyPatch) -> None:
    """A committed lease does not expire."""
    patch.setattr(Slot, "is_timed", property(lambda slot: slot.state is SlotState.LEASED))


def ignore_terms(patch: pytest.MonkeyPatch) -> None:
    """An orchestrator that was replaced is served."""
    patch.setattr(SeenTerms, "require", lambda self, term: None)


PLANTS = (forget_soon, grant_twice, miss_running_calls, keep_committed_leases, ignore_terms)


def test_the_protocol_holds() -> None:
    run_state_machine_as_test(LeaseProtocol, settings=QUICK)


@pytest.mark.nightly
def test_the_protocol_holds_for_long() -> None:
    run_state_machine_as_test(LeaseProtocol, settings=THOROUGH)


@pytest.mark.nightly
@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_a_fault_is_found(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    hunt = settings(UNTIMED, max_examples=10_000, phases=[Phase.generate], report_multiple_bugs=False)
    with pytest.raises(AssertionError):
        run_state_machine_as_test(LeaseProtocol, settings=hunt)
