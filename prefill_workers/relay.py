"""How one rank of a chain hands the baton on: earlier tokens' KV in, those and its own out, layer by layer, in pieces.

A layer's KV travels in pieces: each rank's chunk is one, or, where it is long and more than one rank needs it, several.
Sender and receiver derive them from the job. A rank that owns the tokens [s, e), behind a cached prefix that ends at P,

    receives the pieces of [P, s) in place, into memory that the layer has only while it is on its way (LayerBuffers),
    writes   its own rows [s, e) in place, into a buffer that keeps all layers, for they are pushed to the slot as well,
    sends    each piece from where it lies, as soon as it is final: received, or projected.

So no piece is copied, waits for another of its layer, or is sent before its last byte is final, and a rank that is
still busy attending delays nobody behind it: whichever thread sees a piece become final passes it on, the link's
receiving thread or the engine's. Pieces of a layer leave in the order in which they become final, since the next rank
needs all of them before it can go on; layers leave one after another, so that no row of a later layer is in the way of
one that is needed sooner. The last rank passes nothing on, and the first receives nothing: what travels in all is sum
over ranks but the last of (e_i - P), times row bytes, times layers.

KV-Runahead (Cho, Rastegari, Naik, ICML 2024), section 4.1, without its concatenation, and with cut-through where it
stores and forwards; docs/kv_runahead.md. Step 5 of a request's way (DESIGN.md, section 4). Used by the engine's thread
and by link threads, under the engine's lock.
"""

import math
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence

from baton.clock import Clock
from baton.errors import ChainError
from baton.ids import Rank
from baton.types import TokenRange
from modeling.kv.buffers import OUT_OF_MEMORY, KvBuffer, KvRows, LayerBuffers, byte_view
from prefill_workers.job import Job
from prefill_workers.links import LinkHeader, LinkStatus

PIECE_TOKENS = 1024
"""Tokens of a piece that somebody passes on, at most: large enough that a message's fixed costs hardly count, small
enough that the next link begins long before a long chunk has come. All ranks of a group must use the same."""

SendMessage = Callable[[Rank, LinkHeader, memoryview | None], None]
"""Links.send, and who counts with it: enqueues, never blocks."""


class Relay:
    """One job's KV on one rank, on its way along the chain. Owns the counters and `earlier_kv`; `own_kv` is shared with
    ChainJob.

    Thread-safe: `lock` is the engine's, re-entrant, and `send` may take it.
    """

    def __init__(
        self,
        job: Job,
        rank: Rank,
        own_kv: KvBuffer,
        earlier_kv: LayerBuffers,
        *,
        clock: Clock,
        lock: threading.Condition,
        send: SendMessage,
    ) -> None:
        place = job.ranks.index(rank)
        self.source = job.ranks[place - 1] if place else None
        """The rank that sends to this one."""
        self.target = job.ranks[place + 1] if place + 1 < len(job.ranks) else None
        """The rank that this one sends to."""
        self.own = job.chunks[place]
        self.earlier = TokenRange(job.cached.end, self.own.start)
        self.num_bytes_sent = 0
        self.num_sent = 0
        """Messages with these bytes."""
        self.send_s = 0.0
        """Seconds in which they were on their way: each from when the link was free for it to its arrival."""
        self._job, self._clock, self._lock, self._send = job, clock, lock, send
        self._own_kv, self._earlier_kv = own_kv, earlier_kv
        self._num_layers = own_kv.layout.num_layers
        self._earlier_pieces = [piece for before in range(place) for piece in _pieces(job, before)]
        self._own_pieces = _pieces(job, place)
        self._missing = list(self._earlier_pieces)
        self._arrived_s: list[float] = []
        self._num_received = self._num_layers if self.source is None else 0
        self._num_projected = 0
        self._final: dict[int, list[TokenRange]] = {}
        """Pieces that may leave once their layer's turn has come, by layer."""
        self._passing_layer = self._num_passed = 0
        """The layer whose turn it is to leave, and how many of its pieces have been handed to the link."""
        self._handed_s: deque[float] = deque()
        self._last_sent_s = -math.inf
        self._uses: Counter[int] = Counter()
        """How often the earlier rows of a layer have been used: attended to, or a piece of them sent."""
        self._aborted = False

    @property
    def done(self) -> bool:
        """Whether all layers are in and, where there is a next rank, have left."""
        if self.target is None:
            return self._num_received == self._num_layers
        return self.num_sent == self._num_layers * self._num_pieces

    def has_received(self, layer: int) -> bool:
        """Whether the earlier tokens' rows of `layer` are in."""
        return layer < self._num_received

    def arrived_s(self, layer: int) -> float:
        """When a layer that was received came in, on the clock's now_s; without a source, the beginning of time."""
        return self._arrived_s[layer] if self.source is not None else float("-inf")

    def place(self, source: Rank, header: LinkHeader) -> memoryview:
        """Where the payload of `header` is to be written. Raises ChainError when it is no piece that is expected now,
        and when there is no memory for it."""
        expected = self._header(self._num_received, header.tokens)
        is_due = header == expected and header.tokens in self._missing and not self.has_received(self._num_layers - 1)
        if source != self.source or not is_due:
            raise ChainError(
                f"job {self._job.number}: rank {source} sent {header}, expected layer {self._num_received}'s rows of "
                f"{self._missing} from rank {self.source}: give all ranks the same job"
            )
        try:
            return byte_view(self._earlier_kv.span(header.layer, header.tokens))
        except OUT_OF_MEMORY as error:
            raise ChainError(f"job {self._job.number}: no memory for layer {header.layer}: retry later") from error

    def received(self, header: LinkHeader) -> None:
        """The payload of `header`, for which there was a place, is in it."""
        with self._lock:
            self._missing.remove(header.tokens)
            if not self._missing:
                self._num_received += 1
                self._arrived_s.append(self._clock.now_s())
                self._missing = list(self._earlier_pieces)
            self._pass_on(header.layer, (header.tokens,))

    def projected(self) -> None:
        """The next layer's own rows are in place."""
        with self._lock:
            self._num_projected += 1
            self._pass_on(self._num_projected - 1, self._own_pieces)

    def earlier_rows(self, layer: int) -> KvRows:
        """The earlier tokens' rows of a layer that was received; to be read before `attended`."""
        with self._lock:
            return self._earlier_kv.rows(layer, self.earlier)

    def earlier_bytes(self, layer: int) -> memoryview:
        """The memory of `earlier_rows`; likewise."""
        with self._lock:
            return byte_view(self._earlier_kv.span(layer, self.earlier))

    def attended(self, layer: int) -> None:
        """This rank has no more use for the earlier tokens' rows of `layer`."""
        with self._lock:
            self._used(layer)

    def sent(self, header: LinkHeader) -> None:
        """A message of this job has left."""
        with self._lock:
            self.num_bytes_sent += header.num_bytes
            if header.status is LinkStatus.DATA:
                self.num_sent += 1
                now_s = self._clock.now_s()
                self.send_s += now_s - max(self._handed_s.popleft(), self._last_sent_s)
                self._last_sent_s = now_s
                if header.tokens.start < self.own.start:
                    self._used(header.layer)

    def alive(self) -> None:
        """Tells the next rank to have patience, if it may be waiting for more of this job."""
        self._tell(LinkStatus.ALIVE)

    def abort(self) -> None:
        """Tells the next rank that no more of this job will come, if more would; passes nothing on from here on."""
        self._tell(LinkStatus.ABORT)

    @property
    def _num_pieces(self) -> int:
        """Of a layer, on the way out."""
        return len(self._earlier_pieces) + len(self._own_pieces)

    def _tell(self, status: LinkStatus) -> None:
        with self._lock:
            if self.target is not None and self._passing_layer < self._num_layers and not self._aborted:
                self._send(self.target, LinkHeader.bare(self._job.epoch, self._job.number, status), None)
            self._aborted |= status is LinkStatus.ABORT

    def _pass_on(self, layer: int, pieces: Sequence[TokenRange]) -> None:
        """`pieces` of `layer` have become final: sends all whose turn it is."""
        if self.target is None or self._aborted:
            return
        self._final.setdefault(layer, []).extend(pieces)
        while (ready := self._final.pop(self._passing_layer, None)) is not None:
            for tokens in ready:
                self._handed_s.append(self._clock.now_s())
                self._send(self.target, self._header(self._passing_layer, tokens), self._payload(tokens))
            self._num_passed += len(ready)
            if self._num_passed == self._num_pieces:
                self._passing_layer, self._num_passed = self._passing_layer + 1, 0

    def _payload(self, tokens: TokenRange) -> memoryview:
        """The rows of a piece in the layer whose turn it is, where they lie."""
        kv = self._own_kv if tokens.start >= self.own.start else self._earlier_kv
        return byte_view(kv.span(self._passing_layer, tokens))

    def _used(self, layer: int) -> None:
        """Gives a layer's memory to a later one once everybody is done with it."""
        self._uses[layer] += 1
        num_sends = len(self._earlier_pieces) if self.target is not None else 0
        if self._uses[layer] == 1 + num_sends:
            del self._uses[layer]
            self._earlier_kv.release(layer)

    def _header(self, layer: int, tokens: TokenRange) -> LinkHeader:
        num_bytes = len(tokens) * self._own_kv.layout.row_bytes
        return LinkHeader(self._job.epoch, self._job.number, layer, tokens, LinkStatus.DATA, num_bytes)


def _pieces(job: Job, place: int) -> list[TokenRange]:
    """What the chunk of the rank at `place` is sent in: whole, when the rank that gets it passes nothing on."""
    chunk = job.chunks[place]
    return chunk.split(PIECE_TOKENS) if place + 2 < len(job.ranks) else [chunk]
