"""List of the attempts on each generation group: the sequences that it decodes, and the prompts that it still prefills.

The list reads the requests' records: an entry is valid as long as its attempt runs, and is waiting for its prefill
until it has a token. So no caller removes entries. The duration of a local prefill, i.e. one by the generation group
itself, is reported once to the planner, when its end is noticed. On the loop.
"""

from collections.abc import Hashable
from dataclasses import dataclass, replace

from baton.planning.planner import ChainPlanner
from baton.results.prefill_trace import PlacementTerms
from orchestrator.requests.record import RequestRecord
from orchestrator.requests.states import RequestState

_LEAST_LEFT = 0.25
"""Minimum fraction of a local prefill that is assumed to remain as long as it has no token, even if it is overdue."""


@dataclass(frozen=True)
class _Guest:
    """One attempt on a generation group."""

    record: RequestRecord
    attempt: int
    ends_s: float | None = None
    """Predicted time, on Clock.now_s(), at which the attempt's local prefill ends; None if a chain prefills."""
    nominal_s: float = 0.0
    """Predicted duration of the attempt's local prefill alone, in seconds, not scaled by measured durations."""
    queued_s: float | None = None
    """Predicted seconds of earlier local prefills in the group, not scaled by measured durations; None if the attempt
    also waits for slots or memory."""

    @property
    def is_there(self) -> bool:
        """Return True if this attempt is still the present attempt of its request."""
        return self.attempt == self.record.attempt.number and self.record.state is not RequestState.FINISHED

    @property
    def took_s(self) -> float | None:
        """Return the seconds from the slots to the first token, on one clock; None if there is none or another attempt
        made it."""
        leased_s, seen_s = self.record.attempt.leased_s, self.record.first_seen_s
        return None if leased_s is None or seen_s is None or seen_s < leased_s else seen_s - leased_s

    @property
    def has_token(self) -> bool:
        """Return True if this attempt has produced a token."""
        return self.record.state is RequestState.STREAMING or self.took_s is not None


class GenerationLoad:
    """Attempts on all generation groups, by incarnation of the group (a group that is replaced is a new
    incarnation)."""

    def __init__(self, planner: ChainPlanner) -> None:
        self._planner = planner
        self._guests: dict[Hashable, dict[int, _Guest]] = {}
        """Attempts on each incarnation of a group, by `id(record)`. Entries keep their records alive. The incarnation
        that was checked least recently by `place` is the first."""
        self._incarnation_of: dict[int, Hashable] = {}
        """Incarnation of the group of a record's latest attempt, by `id(record)`."""

    def __len__(self) -> int:
        """Return the number of running attempts."""
        return sum(len(self._present(incarnation)) for incarnation in list(self._guests))

    def place(
        self,
        record: RequestRecord,
        incarnation: Hashable,
        local: PlacementTerms | None = None,
        *,
        now_s: float = 0.0,
        has_room: bool = False,
    ) -> None:
        """Record that the request's attempt runs on that incarnation of a group. `local` is the prediction for a
        prefill by the group itself; None if a chain prefills or if there is no prediction.

        `has_room` is True if a local prefill waits only for other prefills, not for slots or memory. Its duration is
        then reported to the planner.
        """
        guest = _Guest(record, record.attempt.number)
        if local is not None:
            factor = self._planner.local_factor
            queued_s = local.queue_s / factor if has_room else None
            nominal_s = (local.prefill_s + local.steps_s) / factor
            guest = replace(guest, ends_s=now_s + local.own_s, nominal_s=nominal_s, queued_s=queued_s)
        self._forget(id(record))
        self._guests.setdefault(incarnation, {})[id(record)] = guest
        self._incarnation_of[id(record)] = incarnation
        self._look_through_one()

    def context_tokens(self, incarnation: Hashable) -> float | None:
        """Return the mean number of tokens of the group's sequences; None if it has none."""
        held = [guest.record.num_tokens for guest in self._present(incarnation)]
        return sum(held) / len(held) if held else None

    def records(self, incarnation: Hashable) -> list[RequestRecord]:
        """Return the records of the requests whose present attempts run on the group."""
        return [guest.record for guest in self._present(incarnation)]

    def queue_s(self, incarnation: Hashable, now_s: float) -> float:
        """Return the predicted seconds until the group has finished all its pending local prefills."""
        waiting = [guest for guest in self._present(incarnation) if guest.ends_s is not None and not guest.has_token]
        if not waiting:
            return 0.0
        left_s, factor = 0.0, self._planner.local_factor
        for ends_s, nominal_s in sorted((guest.ends_s or 0.0, guest.nominal_s) for guest in waiting):
            share = 1.0 if left_s else _LEAST_LEFT  # only the first attempt has begun
            left_s = max(ends_s - now_s, left_s + share * factor * nominal_s)
        return left_s

    def _look_through_one(self) -> None:
        """Remove ended attempts of one incarnation per call. Otherwise the entries of groups that no longer exist would
        remain."""
        incarnation = next(iter(self._guests))
        self._present(incarnation)
        if guests := self._guests.pop(incarnation, None):
            self._guests[incarnation] = guests

    def _present(self, incarnation: Hashable) -> list[_Guest]:
        """Return the running attempts on that incarnation of a group. Remove the others, and report finished local
        prefills to the planner."""
        present = []
        for key, guest in list(self._guests.get(incarnation, {}).items()):
            if guest.ends_s is not None and guest.has_token:
                if guest.queued_s is not None and guest.attempt == 1 and guest.took_s is not None:
                    self._planner.observe_local(guest.took_s, guest.queued_s + guest.nominal_s)
                self._guests[incarnation][key] = guest = _Guest(guest.record, guest.attempt)
            if guest.is_there:
                present.append(guest)
            else:
                self._forget(key)
        return present

    def _forget(self, key: int) -> None:
        """Remove the entry of the record with that id, if there is one."""
        incarnation = self._incarnation_of.pop(key, None)
        if incarnation is not None:
            del self._guests[incarnation][key]
            if not self._guests[incarnation]:
                del self._guests[incarnation]
