"""Tracks the peers from which this rank expects a sign of life, and since when it does.

A dead peer breaks its links at once; a stopped peer is only silent. A sign of life is a message from the peer, or one
that the peer received. A peer is overdue when it has shown no sign of life for longer than a limit, while a message to
it waits to be sent or a job waits for its KV. A rank in a long turn sends ALIVE to the ranks that wait, as long as it
detects that it makes progress (`baton.process.turn_watch`). While it prepares a job, it sends ALIVE to all ranks
(`prefill_workers.epoch`). So silence means a fault, even if the predicted time from which the limit is computed was
wrong, or the peer computes another job than predicted.

Used by `prefill_workers.epoch`. Pure, with the clock passed in; the engine's lock guards it.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from baton.process.clock import Clock
from baton.process.turn_watch import limit_s
from baton.types import Rank


@dataclass(frozen=True, order=True)
class Due:
    """Time by which a peer must show a sign of life, in seconds of the clock's now_s, and the limit from which it was
    computed."""

    deadline_s: float
    peer: Rank
    limit_s: float


class Watchdog:
    """Tracks signs of life from all peers of one epoch. `floor_s` is the shortest limit, in seconds."""

    def __init__(self, clock: Clock, floor_s: float) -> None:
        self.clock, self.floor_s = clock, floor_s
        self._sign_s: dict[Rank, float] = {}
        self._unsent: Counter[Rank] = Counter()

    def heard(self, peer: Rank) -> None:
        """Record a sign of life from `peer`."""
        self._sign_s[peer] = self.clock.now_s()

    def sending(self, peer: Rank) -> None:
        """Record that a message to `peer` waits to be sent."""
        if not self._unsent[peer]:
            self.heard(peer)  # no other message was waiting: the limit counts from now
        self._unsent[peer] += 1

    def sent(self, peer: Rank) -> None:
        """Record that `peer` received a message."""
        self._unsent[peer] -= 1
        self.heard(peer)

    def is_idle(self, peer: Rank) -> bool:
        """Return whether no message to `peer` waits to be sent."""
        return not self._unsent[peer]

    def first_due(self, waits: Iterable[tuple[Rank, float]], turn_s: float) -> Due | None:
        """Return the earliest deadline of all peers from which a sign of life is expected; None if there are none. They
        are the peers with unsent messages and the peers in `waits`, which gives for each the time at which a job began
        to wait for it, in seconds of the clock's now_s. The limit is a few times `turn_s`, the longest expected turn,
        and at least the floor."""
        most_s = limit_s(self.floor_s, turn_s)
        owing = [(peer, 0.0) for peer, count in self._unsent.items() if count]
        dues = (
            Due(max(since_s, self._sign_s.get(peer, since_s)) + most_s, peer, most_s)
            for peer, since_s in [*owing, *waits]
        )
        return min(dues, default=None)
