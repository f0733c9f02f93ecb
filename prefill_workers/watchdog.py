"""Which peer owes this rank something, and since when.

A dead peer breaks its links at once; a stopped one is only silent. A peer is overdue when it has shown no sign of life
for longer than the limit, while a message to it has not left or a job has nothing to do but wait for it. Signs of life:
something came from it, or it took a message. A rank whose turn takes long, whatever the job, sends ALIVE to those that
wait while it sees itself work (turn_watch.py), and to all while it prepares a job (epoch.py); so silence does mean
trouble, also where the prediction that the limit comes from was wrong, or is for another job than the one that the peer
is busy with.

Pure, with the clock passed in; whoever owns one guards it.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from baton.clock import Clock
from baton.ids import Rank
from prefill_workers.turn_watch import limit_s


@dataclass(frozen=True, order=True)
class Due:
    """By when a peer must be heard of, on the clock's now_s."""

    deadline_s: float
    peer: Rank
    limit_s: float


class Watchdog:
    """Signs of life from all peers of one epoch. `floor_s`: the limit, at least, in seconds."""

    def __init__(self, clock: Clock, floor_s: float) -> None:
        self._clock = clock
        self._floor_s = floor_s
        self._sign_s: dict[Rank, float] = {}
        self._unsent: Counter[Rank] = Counter()

    def heard(self, peer: Rank) -> None:
        """Something came from `peer`."""
        self._sign_s[peer] = self._clock.now_s()

    def sending(self, peer: Rank) -> None:
        """A message to `peer` waits to leave."""
        if not self._unsent[peer]:
            self.heard(peer)  # the first to wait: patience begins now
        self._unsent[peer] += 1

    def sent(self, peer: Rank) -> None:
        """`peer` took a message."""
        self._unsent[peer] -= 1
        self.heard(peer)

    def is_idle(self, peer: Rank) -> bool:
        """Whether no message to `peer` waits to leave."""
        return not self._unsent[peer]

    def first_due(self, waits: Iterable[tuple[Rank, float]], turn_s: float) -> Due | None:
        """The first deadline, of all peers with unsent messages and of those in `waits`: (peer, since when on now_s).

        The limit is a few times `turn_s`, the longest turn that is to be expected, and at least the floor.
        """
        most_s = limit_s(self._floor_s, turn_s)
        owing = [(peer, 0.0) for peer, count in self._unsent.items() if count]
        dues = (
            Due(max(since_s, self._sign_s.get(peer, since_s)) + most_s, peer, most_s)
            for peer, since_s in [*owing, *waits]
        )
        return min(dues, default=None)
