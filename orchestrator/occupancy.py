"""Who is at which generation group: the rows that it decodes, and the prompts that it has yet to prefill by itself.

The book reads the records of the requests: an entry counts for as long as its attempt runs, and as one that is to be
prefilled until it has a token. So nobody needs to take it out. What a local prefill took is told to the planner, once,
when that is seen. Step 3 of a request's way (DESIGN.md, section 4). On the loop.
"""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass

from orchestrator.lifecycle import RequestRecord, RequestState
from planning.planner import ChainPlanner


@dataclass(frozen=True)
class _Guest:
    """One attempt."""

    record: RequestRecord
    attempt: int
    life: Hashable
    """Of its group."""
    ends_s: float | None = None
    """When its local prefill is predicted to be done, in unix seconds; None when a chain prefills."""
    nominal_s: float = 0.0
    """What that was predicted to take, unscaled by what others took."""

    @property
    def is_there(self) -> bool:
        return self.attempt == self.record.attempt and self.record.state is not RequestState.FINISHED

    @property
    def has_token(self) -> bool:
        """Whether this attempt has, as far as that can be known."""
        return self.record.first_token_ns >= self.record.leased_ns > 0


class Occupancy:
    """Of all generation groups, by their lives."""

    def __init__(self, planner: ChainPlanner) -> None:
        self._planner = planner
        self._guests: dict[int, _Guest] = {}
        """By the identity of their records, which they keep alive."""

    def __len__(self) -> int:
        """Attempts that run."""
        return sum(1 for _ in self._present())

    def place(self, record: RequestRecord, life: Hashable, ends_s: float | None = None, nominal_s: float = 0.0) -> None:
        """The request's attempt is at that group; with `ends_s`, it is prefilled there."""
        self._guests[id(record)] = _Guest(record, record.attempt, life, ends_s, nominal_s)

    def context_tokens(self, life: Hashable) -> float | None:
        """Tokens that a row of the group has, in the mean; None when there is none."""
        held = [guest.record.num_tokens for guest in self._present() if guest.life == life]
        return sum(held) / len(held) if held else None

    def queue_s(self, life: Hashable, now_s: float) -> float:
        """Predicted seconds until the group has prefilled all that it has yet to prefill by itself."""
        waiting = [guest for guest in self._present() if guest.life == life and not guest.has_token]
        return max([0.0, *(guest.ends_s - now_s for guest in waiting if guest.ends_s is not None)])

    def _present(self) -> Iterator[_Guest]:
        """Those whose attempts run; forgets the others."""
        for key, guest in list(self._guests.items()):
            if guest.ends_s is not None and guest.attempt == 1 and guest.has_token:
                measured_s = (guest.record.first_token_ns - guest.record.leased_ns) / 1e9
                self._planner.observe_local(measured_s, guest.nominal_s)
                self._guests[key] = guest = _Guest(guest.record, guest.attempt, guest.life)
            if guest.is_there:
                yield guest
            else:
                del self._guests[key]
