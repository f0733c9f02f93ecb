"""Relays KV along a chain: receives earlier tokens' KV and sends it on with this rank's own, layer by layer.

A layer's KV travels in pieces. Each rank's chunk is one piece or, where the chunk is long and several ranks need it,
several. Sender and receiver derive the pieces from the job. A rank that owns the tokens [s, e), after a cached prefix
that ends at P,

    receives the pieces of [P, s) in place, into memory that the layer has only until it is used (LayerBuffers),
    writes   its own rows [s, e) in place, into a buffer that keeps all layers, as they are pushed to the slot as well,
    sends    each piece from its place in memory as soon as it is final: received, or projected.

So no piece is copied, waits for another of its layer, or is sent before its last byte is final. A rank that is still
attending delays no later rank: the thread that makes a piece final (the link's receiving thread, or the engine's)
passes it on. Pieces of a layer are sent in the order in which they become final, since the next rank needs all of them
before it can continue. Layers are sent one after another, so that rows of a later layer do not delay rows that are
needed sooner. The last rank passes no KV on, and the first receives none: the total traffic is the sum over all ranks
except the last of (e_i - P), times row bytes, times layers.

Implements KV-Runahead (Cho, Rastegari, Naik, ICML 2024), section 4.1, without its concatenation, and with cut-through
where the paper stores and forwards; docs/kv_runahead.md. Used by `prefill_workers.chain` on the engine's thread and by
`prefill_workers.epoch` on link threads, under the engine's lock.
"""

import math
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.errors import ChainError
from baton.modeling.kv.buffers import OUT_OF_MEMORY, KvBuffer, KvRows, LayerBuffers, byte_view
from baton.process.clock import Clock
from baton.types import Rank, TokenRange
from prefill_workers.job import Job
from prefill_workers.links import LinkHeader, LinkStatus, Payload

PIECE_TOKENS = 1024
"""Largest number of tokens in a piece that some rank passes on: large enough that a message's fixed costs hardly
matter, small enough that the next link begins long before a long chunk has arrived. Must be the same on all ranks of a
group."""

SendMessage = Callable[[Rank, LinkHeader, Payload | None], None]
"""A function that enqueues a message as `Links.send` does, and never blocks."""


@dataclass(frozen=True)
class RankKv:
    """KV that one rank of a job has, in the memory from and to which links carry it."""

    job: Job
    rank: Rank
    own: KvBuffer
    """KV of the rank's own tokens, in all layers."""
    earlier: LayerBuffers
    """KV of the tokens that earlier ranks compute."""
    on_device: bool = False
    """True if links carry the device's memory, which then holds this KV."""

    def payload(self, rows: Tensor) -> Payload:
        """Return contiguous rows as a payload: a view of their bytes, between devices of type uint8."""
        return rows.view(torch.uint8).view(-1) if self.on_device else byte_view(rows)


class KvPipeline:
    """Relay of one job's KV on one rank of a chain. Owns the counters and `kv.earlier`; `kv.own` is shared with
    ChainJob. Thread-safe: `lock` is the engine's, re-entrant, and `send` may take it."""

    def __init__(self, kv: RankKv, *, clock: Clock, lock: threading.Condition, send: SendMessage) -> None:
        self.kv = kv
        job, place = kv.job, kv.job.ranks.index(kv.rank)
        self.source = job.ranks[place - 1] if place else None
        """The rank that sends to this one; None on the chain's first rank."""
        self.target = job.ranks[place + 1] if place + 1 < len(job.ranks) else None
        """The rank that this one sends to; None on the chain's last rank."""
        self.own = job.chunks[place]
        self.earlier = TokenRange(job.cached.end, self.own.start)
        self.num_bytes_sent = 0
        self.num_sent = 0
        """Number of messages in which `num_bytes_sent` were sent."""
        self.send_s = 0.0
        """Seconds of transfer of these messages, each from the time when the link was free to its arrival."""
        self._job, self._clock, self._lock, self._send = job, clock, lock, send
        self._num_layers = kv.own.layout.num_layers
        self._earlier_pieces = [piece for before in range(place) for piece in _pieces(job, before)]
        self._own_pieces = _pieces(job, place)
        self._missing = list(self._earlier_pieces)
        self._arrived_s: list[float] = []
        self._num_received = self._num_layers if self.source is None else 0
        self._num_projected = 0
        self._final: dict[int, list[TokenRange]] = {}
        """Final pieces that were not sent yet, by layer: they wait until earlier layers were sent."""
        self._passing_layer = self._num_passed = 0
        """The layer that is being sent, and the number of its pieces that have been passed to the link."""
        self._handed_s: deque[float] = deque()
        self._last_sent_s = -math.inf
        self._uses: Counter[int] = Counter()
        """Number of uses of each layer's earlier rows so far: attending to them, and sending each of their pieces."""
        self._aborted = False

    @property
    def done(self) -> bool:
        """Return whether all layers have arrived or, where there is a next rank, have left."""
        if self.target is None:
            return self._num_received == self._num_layers
        return self.num_sent == self._num_layers * self._num_pieces

    def has_received(self, layer: int) -> bool:
        """Return whether the earlier tokens' rows of `layer` have arrived."""
        return layer < self._num_received

    def arrived_s(self, layer: int) -> float:
        """Return when a received layer arrived, on the clock's now_s; minus infinity on the chain's first rank."""
        return self._arrived_s[layer] if self.source is not None else float("-inf")

    def place(self, source: Rank, header: LinkHeader) -> Payload:
        """Return the memory into which the payload of `header` is to be written. Raises ChainError when the piece is
        not expected now, and when there is no memory for it."""
        expected = self._header(self._num_received, header.tokens)
        is_due = header == expected and header.tokens in self._missing and not self.has_received(self._num_layers - 1)
        if source != self.source or not is_due:
            raise ChainError(
                f"job {self._job.number}: rank {source} sent {header}, expected layer {self._num_received}'s rows of "
                f"{self._missing} from rank {self.source}: give all ranks the same job"
            )
        try:
            return self.kv.payload(self.kv.earlier.span(header.layer, header.tokens))
        except OUT_OF_MEMORY as error:
            raise ChainError(f"job {self._job.number}: no memory for layer {header.layer}: retry later") from error

    def received(self, header: LinkHeader) -> None:
        """Note that the payload of `header` is in its place, and pass its piece on."""
        with self._lock:
            self._missing.remove(header.tokens)
            if not self._missing:
                self._num_received += 1
                self._arrived_s.append(self._clock.now_s())
                self._missing = list(self._earlier_pieces)
            self._pass_on(header.layer, (header.tokens,))

    def projected(self) -> None:
        """Note that the next layer's own rows are in place, and pass them on."""
        with self._lock:
            self._num_projected += 1
            self._pass_on(self._num_projected - 1, self._own_pieces)

    def earlier_rows(self, layer: int) -> KvRows:
        """Return the earlier tokens' rows of a layer that was received. Read them before `attended`."""
        with self._lock:
            return self.kv.earlier.rows(layer, self.earlier)

    def earlier_span(self, layer: int) -> Tensor:
        """Return the earlier tokens' rows of a layer that was received, `[T, 2, G, H]`. Read them before `attended`."""
        with self._lock:
            return self.kv.earlier.span(layer, self.earlier)

    def attended(self, layer: int) -> None:
        """Note that this rank has read the earlier tokens' rows of `layer` for the last time: the memory may be written
        to. Must not be called without earlier tokens."""
        with self._lock:
            self._used(layer)

    def sent(self, header: LinkHeader) -> None:
        """Count a message of this job that was sent, and release its rows."""
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
        """Send ALIVE to the next rank, so that it keeps waiting, if it may be waiting for more of this job."""
        self._tell(LinkStatus.ALIVE)

    def abort(self) -> None:
        """Send ABORT to the next rank, if more of this job was due; pass no piece on from now on."""
        self._tell(LinkStatus.ABORT)

    @property
    def _num_pieces(self) -> int:
        """Return the number of pieces of each layer that leave this rank."""
        return len(self._earlier_pieces) + len(self._own_pieces)

    def _tell(self, status: LinkStatus) -> None:
        with self._lock:
            if self.target is not None and self._passing_layer < self._num_layers and not self._aborted:
                self._send(self.target, LinkHeader.bare(self._job.epoch, self._job.number, status), None)
            self._aborted |= status is LinkStatus.ABORT

    def _pass_on(self, layer: int, pieces: Sequence[TokenRange]) -> None:
        """Take pieces of `layer` that have become final, and send all final pieces up to the first unfinished layer."""
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

    def _payload(self, tokens: TokenRange) -> Payload:
        """Return the payload of a piece's rows in the layer that is being sent."""
        kv = self.kv.own if tokens.start >= self.own.start else self.kv.earlier
        return self.kv.payload(kv.span(self._passing_layer, tokens))

    def _used(self, layer: int) -> None:
        """Count a use of a layer's earlier rows, and give their memory to a later layer after the last use."""
        self._uses[layer] += 1
        num_sends = len(self._earlier_pieces) if self.target is not None else 0
        if self._uses[layer] == 1 + num_sends:
            del self._uses[layer]
            self.kv.earlier.release(layer)

    def _header(self, layer: int, tokens: TokenRange) -> LinkHeader:
        num_bytes = len(tokens) * self.kv.own.layout.row_bytes
        return LinkHeader(self._job.epoch, self._job.number, layer, tokens, LinkStatus.DATA, num_bytes)


def _pieces(job: Job, place: int) -> list[TokenRange]:
    """Return the pieces in which the chunk of the rank at `place` is sent: one if the next rank passes none on."""
    chunk = job.chunks[place]
    return chunk.split(PIECE_TOKENS) if place + 2 < len(job.ranks) else [chunk]
