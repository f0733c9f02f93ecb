"""Detects peers that have stopped. Tracks from which peers this rank expects a sign of life, and since when.

A dead peer breaks its links immediately; a stopped peer is only silent. A sign of life is a message from the peer, or a
message that the peer received. A sign of life is expected while a message to the peer waits to be sent, or while a job
waits for the peer's KV. A peer is overdue if it has shown no sign of life for longer than a limit. The limit is
computed from the expected duration of a turn, which is the work of a rank on about one layer of a job.

While a rank computes a layer for a long time, it sends ALIVE to the ranks that wait for it, as long as it makes
progress (`baton.process.turn_watch`). While it prepares a job, it sends ALIVE to all ranks (`prefill_workers.epoch`).
So silence means a fault, even if the expected duration was wrong, or if the peer is computing another job.

Used by `prefill_workers.epoch`. Does no I/O; the clock is passed in. The engine's lock guards it.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from baton.process.clock import Clock
from baton.process.turn_watch import limit_s
from baton.types import Rank


@dataclass(frozen=True, order=True)
class Due:
    """Deadline by which a peer must show a sign of life, as a value of the clock's `now_s`, and the time limit in
    seconds from which the deadline was computed."""

    deadline_s: float
    peer: Rank
    limit_s: float


class Watchdog:
    """Tracks signs of life from all peers of one epoch. A peer is overdue if it is expected to show a sign of life and
    has shown none for longer than a limit. `floor_s` is the minimum of this limit, in seconds."""

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
        """Record that a message was sent and that `peer` received it. The receipt is a sign of life from `peer`."""
        self._unsent[peer] -= 1
        self.heard(peer)

    def is_idle(self, peer: Rank) -> bool:
        """Return True if no message to `peer` waits to be sent."""
        return not self._unsent[peer]

    def first_due(self, waits: Iterable[tuple[Rank, float]], turn_s: float) -> Due | None:
        """Return the earliest deadline of all peers from which a sign of life is expected; None if no sign of life is
        expected.

        A sign of life is expected from peers to which a message waits to be sent, and from the peers in `waits`. Each
        entry of `waits` is a peer and the time, as a value of the clock's `now_s`, at which a job began to wait for the
        peer's KV. The sign of life must come within a multiple of `turn_s`, but at least `floor_s` seconds are allowed.
        `turn_s` is the longest expected turn in seconds. A turn is the work of a rank on about one layer of a job.
        """
        most_s = limit_s(self.floor_s, turn_s)
        owing = [(peer, 0.0) for peer, count in self._unsent.items() if count]
        dues = (
            Due(max(since_s, self._sign_s.get(peer, since_s)) + most_s, peer, most_s)
            for peer, since_s in [*owing, *waits]
        )
        return min(dues, default=None)
