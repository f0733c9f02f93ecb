"""The book of attempts at generation groups: the rows that each group decodes, and the prompts that it still prefills.

It reads the records of the requests: an entry counts for as long as its attempt runs, and as waiting for its prefill
until it has a token, so no caller removes entries. The time that a local prefill took is reported to the planner, once,
when it is seen. On the loop.
"""

from collections.abc import Hashable
from dataclasses import dataclass, replace

from baton.planning.planner import ChainPlanner
from baton.results.prefill_trace import PlacementTerms
from orchestrator.requests.record import RequestRecord
from orchestrator.requests.states import RequestState

_LEAST_LEFT = 0.25
"""Part of a local prefill that is taken to be left for as long as it has no token: one that is overdue is not done."""


@dataclass(frozen=True)
class _Guest:
    """One attempt at a generation group."""

    record: RequestRecord
    attempt: int
    ends_s: float | None = None
    """Time on the clock's now_s() when the attempt's local prefill is predicted to be done; None when a chain
    prefills."""
    nominal_s: float = 0.0
    """Predicted seconds of the attempt's local prefill alone, not scaled by the durations of earlier ones."""
    queued_s: float | None = None
    """Predicted, unscaled seconds of the local prefills before it; None when it also waits for slots or memory."""

    @property
    def is_there(self) -> bool:
        """Return whether this attempt is still its request's present one."""
        return self.attempt == self.record.attempt.number and self.record.state is not RequestState.FINISHED

    @property
    def took_s(self) -> float | None:
        """Return the seconds from slots to first token, by one clock; None if another attempt brought it."""
        leased_s, seen_s = self.record.attempt.leased_s, self.record.first_seen_s
        return None if leased_s is None or seen_s is None or seen_s < leased_s else seen_s - leased_s

    @property
    def has_token(self) -> bool:
        """Return whether this attempt has brought a token."""
        return self.record.state is RequestState.STREAMING or self.took_s is not None


class GenerationLoad:
    """The attempts at all generation groups, by the groups' incarnations."""

    def __init__(self, planner: ChainPlanner) -> None:
        self._planner = planner
        self._guests: dict[Hashable, dict[int, _Guest]] = {}
        """Attempts at each incarnation of a group, by the identity of their records, which they keep alive. The
        incarnation that `place` looked through least recently is the first."""
        self._incarnation_of: dict[int, Hashable] = {}
        """Incarnation at which a record's latest attempt is, by the identity of the record."""

    def __len__(self) -> int:
        """Return the number of attempts that run."""
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
        """Record that the request's attempt is at that group, which prefills it as `local` has just predicted; None for
        a prefill by a chain, and for one without a prediction.

        With `has_room` a local prefill waits only for others, and its duration will be reported to the planner.
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
        """Return the mean number of tokens of a row of the group; None when it has no row."""
        held = [guest.record.num_tokens for guest in self._present(incarnation)]
        return sum(held) / len(held) if held else None

    def records(self, incarnation: Hashable) -> list[RequestRecord]:
        """Return the requests whose present attempts are at the group."""
        return [guest.record for guest in self._present(incarnation)]

    def queue_s(self, incarnation: Hashable, now_s: float) -> float:
        """Return the predicted seconds until the group has done all local prefills that it has before it."""
        waiting = [guest for guest in self._present(incarnation) if guest.ends_s is not None and not guest.has_token]
        if not waiting:
            return 0.0
        left_s, factor = 0.0, self._planner.local_factor
        for ends_s, nominal_s in sorted((guest.ends_s or 0.0, guest.nominal_s) for guest in waiting):
            share = 1.0 if left_s else _LEAST_LEFT  # an attempt behind another has not begun
            left_s = max(ends_s - now_s, left_s + share * factor * nominal_s)
        return left_s

    def _look_through_one(self) -> None:
        """Look through the attempts of one incarnation after another, because no other call asks for groups that are
        gone."""
        incarnation = next(iter(self._guests))
        self._present(incarnation)
        if guests := self._guests.pop(incarnation, None):
            self._guests[incarnation] = guests

    def _present(self, incarnation: Hashable) -> list[_Guest]:
        """Return the attempts that run at the incarnation of a group. Forget the others, and report finished local
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
        """Forget the attempt of the record of that identity, if there is one."""
        incarnation = self._incarnation_of.pop(key, None)
        if incarnation is not None:
            del self._guests[incarnation][key]
            if not self._guests[incarnation]:
                del self._guests[incarnation]
