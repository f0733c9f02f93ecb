"""List of the attempts on each generation group: the sequences that the group decodes, and the prompts that it still
prefills.

The list reads the state of each attempt from its request's record. An attempt counts as running until its record says
otherwise, and as waiting for its prefill until it has a token. Therefore callers do not remove entries. A local prefill
is a prefill by the generation group itself. Its duration is reported once to the planner, when its end is noticed. Runs
on the event loop.
"""

from collections.abc import Hashable
from dataclasses import dataclass, replace

from baton.planning.planner import ChainPlanner
from baton.results.prefill_trace import PlacementTerms
from baton.types import TokenRange
from orchestrator.requests.record import RequestRecord
from orchestrator.requests.states import RequestState

NO_TOKENS = TokenRange(0, 0)
_LEAST_LEFT = 0.25
"""Minimum fraction of a local prefill (one by the generation group itself) that is assumed to remain until the first
token arrives, even if the prefill is overdue."""


@dataclass(frozen=True)
class _Guest:
    """Attempt that runs, or has run, on a generation group."""

    record: RequestRecord
    attempt: int
    planner: ChainPlanner
    """Planner of the group's device. It gets the duration of a prefill by the generation group itself."""
    local: PlacementTerms | None = None
    """Prediction for the prefill by the generation group itself. None if a chain prefills, if there is no prediction,
    or if the prefill has ended."""
    ends_s: float = 0.0
    """Predicted end of this prefill, as a value of `Clock.now_s()`. Used only if `local` is not None."""
    tokens: TokenRange = NO_TOKENS
    """Prompt tokens that the group computes itself. Empty if the duration of this prefill must not be reported, because
    the attempt also waits for slots or memory."""

    @property
    def is_there(self) -> bool:
        """Return True if the attempt is still running: its request has not ended and has not started another
        attempt."""
        return self.attempt == self.record.attempt.number and self.record.state is not RequestState.FINISHED

    @property
    def took_s(self) -> float | None:
        """Return the seconds from the start of this attempt to the request's first token. Return None if there is no
        token yet or if an earlier attempt produced the first token."""
        leased_s, seen_s = self.record.attempt.leased_s, self.record.first_seen_s
        return None if leased_s is None or seen_s is None or seen_s < leased_s else seen_s - leased_s

    @property
    def has_token(self) -> bool:
        """Return True if this attempt has produced a token."""
        return self.record.state is RequestState.STREAMING or self.took_s is not None


class GenerationLoad:
    """Lists the attempts that run on each generation group, by incarnation of the group. A group that is replaced
    becomes a new incarnation."""

    def __init__(self) -> None:
        self._guests: dict[Hashable, dict[int, _Guest]] = {}
        """Attempts on each incarnation of a group, by `id(record)`. The entries keep the records alive, so ids stay
        unique. The first key of the dict is the next incarnation whose ended attempts are removed."""
        self._incarnation_of: dict[int, Hashable] = {}
        """Incarnation of the group on which the latest attempt of a request runs, by `id(record)`."""

    def __len__(self) -> int:
        """Return the number of running attempts."""
        return sum(len(self._present(incarnation)) for incarnation in list(self._guests))

    def place(
        self,
        record: RequestRecord,
        incarnation: Hashable,
        planner: ChainPlanner,
        local: PlacementTerms | None = None,
        *,
        tokens: TokenRange = NO_TOKENS,
        now_s: float = 0.0,
    ) -> None:
        """Record that the request's attempt runs on this incarnation of a group. `planner` is the planner of the
        group's device. `local` is the prediction for a prefill by the group itself. It is None if a chain prefills or
        if there is no prediction.

        `tokens` are the prompt tokens that the group then computes. They must be empty if the group lacks slots or
        memory for the attempt. The measured duration of the prefill is then not reported to the planner, because it
        includes other waits than those for other prefills.
        """
        ends_s = 0.0 if local is None else now_s + local.own_s
        guest = _Guest(record, record.attempt.number, planner, local, ends_s, tokens)
        self._forget(id(record))
        self._guests.setdefault(incarnation, {})[id(record)] = guest
        self._incarnation_of[id(record)] = incarnation
        first = next(iter(self._guests))
        self._present(first)  # removes ended attempts: otherwise those of groups that no longer exist would remain
        if guests := self._guests.pop(first, None):
            self._guests[first] = guests

    def context_tokens(self, incarnation: Hashable) -> float | None:
        """Return the mean number of tokens per sequence of the group; None if the group has no sequences."""
        held = [guest.record.num_tokens for guest in self._present(incarnation)]
        return sum(held) / len(held) if held else None

    def records(self, incarnation: Hashable) -> list[RequestRecord]:
        """Return the records of the requests whose present attempts run on the group."""
        return [guest.record for guest in self._present(incarnation)]

    def queue_s(self, incarnation: Hashable, now_s: float) -> float:
        """Return the predicted seconds until the group has finished all prefills that it runs by itself. `now_s` is the
        present time in seconds."""
        waiting = (
            (guest.ends_s, guest.local.prefill_s + guest.local.steps_s)
            for guest in self._present(incarnation)
            if guest.local is not None and not guest.has_token
        )
        left_s = 0.0
        for ends_s, prefill_s in sorted(waiting):
            share = 1.0 if left_s else _LEAST_LEFT  # only the first attempt has begun
            left_s = max(ends_s - now_s, left_s + share * prefill_s)
        return left_s

    def _present(self, incarnation: Hashable) -> list[_Guest]:
        """Return the running attempts on that incarnation of a group. Remove the others, and report finished local
        prefills to the planner."""
        present = []
        for key, guest in list(self._guests.get(incarnation, {}).items()):
            if (local := guest.local) is not None and guest.has_token:
                if guest.tokens and guest.attempt == 1 and guest.took_s is not None:
                    share = local.prefill_s / local.own_s if local.own_s else 1.0
                    guest.planner.observe_local(guest.tokens, share * guest.took_s)
                self._guests[incarnation][key] = guest = replace(guest, local=None)
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
