"""How one rank of a chain hands the baton on: earlier tokens' KV in, those and its own out, layer by layer.

One buffer holds, for every layer, the rows of tokens [P, e): P is where the cached prefix ends, e where this rank's own
chunk [s, e) ends. Rows are token-major, so per layer

    earlier ranks' rows [P, s)      are received in place,
    own rows            [s, e)      are written in place by the projection,
    all of them         [P, e)      are sent on, one contiguous slice of the same memory.

Nothing is concatenated or copied, and nothing is sent before its last byte is final. A layer is passed on at the moment
when it is both received and projected, by whichever thread sees the second: the link's receiving thread, or the
engine's. So a rank that is still busy attending delays nobody behind it. The last rank passes nothing on, and the first
receives nothing: what travels in all is sum over ranks but the last of (e_i - P), times row bytes, times layers.

KV-Runahead (Cho, Rastegari, Naik, ICML 2024), section 4.1, without its concatenation. Step 5 of a request's way
(DESIGN.md, section 4). Used by the engine's thread and by link threads, under the engine's lock.
"""

import threading
from collections.abc import Callable

from baton.clock import Clock
from baton.errors import ChainError
from baton.ids import Rank
from baton.types import TokenRange
from modeling.kv_buffers import KvBuffer, byte_view
from prefill_workers.job import Job
from prefill_workers.links import LinkHeader, LinkStatus

SendMessage = Callable[[Rank, LinkHeader, memoryview | None], None]
"""Links.send, and who counts with it: enqueues, never blocks."""


class Relay:
    """One job's KV on one rank, on its way along the chain. Owns the counters; the buffer is shared with ChainJob.

    Thread-safe: `lock` is the engine's, re-entrant, and `send` may take it.
    """

    def __init__(
        self, job: Job, rank: Rank, buffer: KvBuffer, *, clock: Clock, lock: threading.Condition, send: SendMessage
    ) -> None:
        place = job.ranks.index(rank)
        self.source = job.ranks[place - 1] if place else None
        """The rank that sends to this one."""
        self.target = job.ranks[place + 1] if place + 1 < len(job.ranks) else None
        """The rank that this one sends to."""
        self.own = job.chunks[place]
        self.earlier = TokenRange(job.cached.end, self.own.start)
        self.num_bytes_sent = 0
        self._all = TokenRange(job.cached.end, self.own.end)
        self._job, self._buffer, self._clock, self._send = job, buffer, clock, send
        self._num_layers = buffer.layout.num_layers
        self._lock = lock
        self._arrived_s: list[float] = []
        self._num_received = self._num_layers if self.source is None else 0
        self._num_projected = self._num_passed = self._num_sent = 0
        self._aborted = False

    @property
    def done(self) -> bool:
        """Whether all layers are in and, where there is a next rank, have left."""
        moved = self._num_received if self.target is None else self._num_sent
        return moved == self._num_layers

    def has_received(self, layer: int) -> bool:
        """Whether the earlier tokens' rows of `layer` are in."""
        return layer < self._num_received

    def arrived_s(self, layer: int) -> float:
        """When a layer that was received came in, on the clock's now_s; without a source, the beginning of time."""
        return self._arrived_s[layer] if self.source is not None else float("-inf")

    def place(self, source: Rank, header: LinkHeader) -> memoryview:
        """Where the payload of `header` is to be written. Raises ChainError when it is not the next one expected."""
        expected = self._header(self._num_received, self.earlier)
        if source != self.source or header != expected or self.has_received(self._num_layers - 1):
            raise ChainError(
                f"job {self._job.number}: rank {source} sent {header}, expected {expected} from rank {self.source}: "
                f"give all ranks the same job"
            )
        return byte_view(self._buffer.span(header.layer, header.tokens))

    def received(self) -> None:
        """The next layer's payload is in place."""
        with self._lock:
            self._num_received += 1
            self._arrived_s.append(self._clock.now_s())
            self._pass_on()

    def projected(self) -> None:
        """The next layer's own rows are in place."""
        with self._lock:
            self._num_projected += 1
            self._pass_on()

    def sent(self, header: LinkHeader) -> None:
        """A message of this job has left."""
        with self._lock:
            self._num_sent += header.status is LinkStatus.DATA
            self.num_bytes_sent += header.num_bytes

    def alive(self) -> None:
        """Tells the next rank to have patience, if it may be waiting for more of this job."""
        self._tell(LinkStatus.ALIVE)

    def abort(self) -> None:
        """Tells the next rank that no more of this job will come, if more would; passes nothing on from here on."""
        self._tell(LinkStatus.ABORT)

    def _tell(self, status: LinkStatus) -> None:
        with self._lock:
            if self.target is not None and self._num_passed < self._num_layers and not self._aborted:
                self._send(self.target, LinkHeader.bare(self._job.epoch, self._job.number, status), None)
            self._aborted |= status is LinkStatus.ABORT

    def _pass_on(self) -> None:
        while self.target is not None and not self._aborted:
            layer = self._num_passed
            if layer >= min(self._num_received, self._num_projected):
                return
            header = self._header(layer, self._all)
            self._num_passed += 1
            self._send(self.target, header, byte_view(self._buffer.span(layer, self._all)))

    def _header(self, layer: int, tokens: TokenRange) -> LinkHeader:
        num_bytes = len(tokens) * self._buffer.layout.row_bytes
        return LinkHeader(self._job.epoch, self._job.number, layer, tokens, LinkStatus.DATA, num_bytes)
