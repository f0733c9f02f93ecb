"""Tracks which peer owes this rank a sign of life, and since when.

A dead peer breaks its links at once; a stopped peer is only silent. A peer is overdue when it has shown no sign of life
for longer than the limit, while a message to it has not been sent or a job can only wait for it. A sign of life is a
message from the peer, or one that it took. A rank whose turn takes long sends ALIVE to the ranks that wait, while it
detects that it works (`baton.process.turn_watch`), and to all ranks while it prepares a job (`prefill_workers.epoch`).
So silence does mean a fault, even if the prediction behind the limit was wrong, or if the peer computes another job
than the predicted one.

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
    """The time, on the clock's now_s, by which a peer must show a sign of life, and the limit that it follows from."""

    deadline_s: float
    peer: Rank
    limit_s: float


class Watchdog:
    """Signs of life from all peers of one epoch. `floor_s` is the shortest limit, in seconds."""

    def __init__(self, clock: Clock, floor_s: float) -> None:
        self.clock, self.floor_s = clock, floor_s
        self._sign_s: dict[Rank, float] = {}
        self._unsent: Counter[Rank] = Counter()

    def heard(self, peer: Rank) -> None:
        """Note a sign of life from `peer`."""
        self._sign_s[peer] = self.clock.now_s()

    def sending(self, peer: Rank) -> None:
        """Note that a message to `peer` waits to be sent."""
        if not self._unsent[peer]:
            self.heard(peer)  # the first message to wait: the limit counts from now
        self._unsent[peer] += 1

    def sent(self, peer: Rank) -> None:
        """Note that `peer` took a message."""
        self._unsent[peer] -= 1
        self.heard(peer)

    def is_idle(self, peer: Rank) -> bool:
        """Return whether no message to `peer` waits to be sent."""
        return not self._unsent[peer]

    def first_due(self, waits: Iterable[tuple[Rank, float]], turn_s: float) -> Due | None:
        """Return the first deadline of the peers that owe a sign of life: those with unsent messages, and those in
        `waits`, each with the time, on the clock's now_s, at which a job began to wait for it. The limit is a few times
        `turn_s`, the longest expected turn, and at least the floor."""
        most_s = limit_s(self.floor_s, turn_s)
        owing = [(peer, 0.0) for peer, count in self._unsent.items() if count]
        dues = (
            Due(max(since_s, self._sign_s.get(peer, since_s)) + most_s, peer, most_s)
            for peer, since_s in [*owing, *waits]
        )
        return min(dues, default=None)
