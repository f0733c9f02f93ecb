"""Relays KV along a chain: receives earlier ranks' KV and sends it on together with this rank's own KV, layer by layer.

A layer's KV is sent in pieces. A piece is the KV of a range of tokens in one layer. The KV of each rank's chunk is
one piece. A long chunk that several later ranks need is divided into pieces of at most `PIECE_TOKENS` tokens. Sender
and receiver derive the pieces from the job. Let the cached prefix end at token P. A rank that computes the tokens
[s, e) does the following:

    receives the pieces of [P, s) directly into a buffer for each layer, which is freed after the layer's last use,
    writes   the KV of [s, e) into a buffer for all layers, from which it is sent on and also pushed to the slot,
    sends    each piece directly from its buffer as soon as the piece is final, that is, received or projected.

No piece is copied. No piece waits for another piece of its layer, and none is sent before its last byte is final. A
rank that still computes attention does not delay later ranks, because the thread that makes a piece final also sends it
on. This is the link's receiving thread for received pieces, and the engine's thread for projected ones. Pieces of a
layer are sent in the order in which they become final, because the next rank needs all of them. Layers are sent one
after another, so that KV of a later layer does not delay KV that is needed sooner. The last rank sends no KV to other
ranks, and the first rank receives none. The total traffic in bytes is sum_i (e_i - P) * row_bytes * num_layers. Here i
runs over all ranks except the last, e_i is the end of rank i's chunk, and row_bytes is the size of the KV of one token
in one layer.

Implements KV-Runahead (Cho, Rastegari, Naik, ICML 2024), section 4.1, with two differences: it does not concatenate KV,
and it forwards KV by cut-through where the paper stores and forwards; see docs/kv_runahead.md. Used by
`prefill_workers.chain` on the engine's thread and by `prefill_workers.epoch` on link threads, under the engine's lock.
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
"""Maximum number of tokens per message, for KV that the receiving rank sends on to the next rank. Large messages make
the fixed cost per message negligible. Small messages let the receiving rank begin to send on a long chunk before all of
it has arrived. Must be the same on all ranks of a group."""

SendMessage = Callable[[Rank, LinkHeader, Payload | None], None]
"""Function that queues a message for sending and never blocks. It has the parameters of `Links.send`."""


@dataclass(frozen=True)
class RankKv:
    """KV of one job on one rank, in memory that links can send from and receive into."""

    job: Job
    rank: Rank
    own: KvBuffer | LayerBuffers
    """KV of the rank's own tokens in all layers. With LayerBuffers, the memory of a layer is allocated when its KV is
    computed, and kept until the end of the job."""
    earlier: LayerBuffers
    """KV of the tokens that earlier ranks of the chain compute."""
    on_device: bool = False
    """True if this KV is in device memory, because links transfer device memory. False if it is in host memory."""

    def payload(self, rows: Tensor) -> Payload:
        """Return the memory of `rows`, a contiguous tensor of KV, as a payload, without a copy. The payload is a byte
        view in host memory, or a uint8 tensor on a device."""
        return rows.view(torch.uint8).view(-1) if self.on_device else byte_view(rows)

    def bytes_of(self, rows: Tensor) -> memoryview:
        """Return the bytes of `rows`, a contiguous tensor of KV. In host memory this is a view. From a device it is a
        copy, and the call blocks until the copy is complete."""
        return self.own.access.read([rows]) if isinstance(self.own, KvBuffer) else byte_view(rows)


class KvPipeline:
    """Relays the KV of one job on one rank of a chain. Owns `kv.earlier`, the memory for the KV of earlier ranks.
    Shares `kv.own`, the KV of this rank, with ChainJob. Thread-safe. `lock` is the engine's lock. It is re-entrant, so
    `send` may acquire it again."""

    def __init__(self, kv: RankKv, *, clock: Clock, lock: threading.Condition, send: SendMessage) -> None:
        self.kv = kv
        job, place = kv.job, kv.job.ranks.index(kv.rank)
        self.source = job.ranks[place - 1] if place else None
        """Rank that sends KV to this rank; None on the chain's first rank."""
        self.target = job.ranks[place + 1] if place + 1 < len(job.ranks) else None
        """Rank to which this rank sends KV; None on the chain's last rank."""
        self.own = job.chunks[place]
        self.earlier = TokenRange(job.cached.end, self.own.start)
        self.num_bytes_sent = 0
        self.num_sent = 0
        """Number of messages with KV that were sent to the next rank."""
        self.send_s = 0.0
        """Total transfer time of the sent KV messages, in seconds. The transfer of a message begins when the message is
        queued and the link has finished the previous one. It ends when the message has arrived."""
        self._job, self._clock, self._lock, self._send = job, clock, lock, send
        self._num_layers = kv.own.layout.num_layers
        self._earlier_pieces = [piece for before in range(place) for piece in _pieces(job, before)]
        self._own_pieces = _pieces(job, place)
        self._missing = list(self._earlier_pieces)
        self._arrived_s: list[float] = []
        self._num_received = self._num_layers if self.source is None else 0
        self._num_projected = 0
        self._final: dict[int, list[TokenRange]] = {}
        """Pieces that were received or projected but are not sent yet, by layer. A piece is the KV of a range of tokens
        in one layer, and is listed as this range. A layer's pieces wait until all earlier layers have been sent."""
        self._passing_layer = self._num_passed = 0
        """`_passing_layer` is the layer that is being sent. `_num_passed` is the number of pieces of this layer
        that were passed to the link."""
        self._handed_s: deque[float] = deque()
        self._last_sent_s = -math.inf
        self._uses: Counter[int] = Counter()
        """Number of times that the KV of earlier ranks has been used, by layer. Attention counts as one use, and so
        does sending each piece. The KV is freed after its last use."""
        self._aborted = False

    @property
    def done(self) -> bool:
        """Return True if the relay is complete: all KV of all layers was sent to the next rank or, on the last rank,
        has arrived."""
        if self.target is None:
            return self._num_received == self._num_layers
        return self.num_sent == self._num_layers * self._num_pieces

    def has_received(self, layer: int) -> bool:
        """Return True if all KV of earlier ranks has arrived for the layer `layer`."""
        return layer < self._num_received

    def arrived_s(self, layer: int) -> float:
        """Return the time at which the KV of a layer was completely received, as a value of the clock's `now_s`. Return
        minus infinity on the first rank of the chain, which receives no KV."""
        return self._arrived_s[layer] if self.source is not None else float("-inf")

    def place(self, source: Rank, header: LinkHeader) -> Payload:
        """Return the memory into which the payload of a message must be received. `header` is the header of the
        message. Raises ChainError if this payload is not expected now, or if its memory cannot be allocated."""
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
        """Record that the payload of a message has been received, and send it on to the next rank."""
        with self._lock:
            self._missing.remove(header.tokens)
            if not self._missing:
                self._num_received += 1
                self._arrived_s.append(self._clock.now_s())
                self._missing = list(self._earlier_pieces)
            self._pass_on(header.layer, (header.tokens,))

    def projected(self) -> None:
        """Record that this rank has computed the KV of its own tokens in one more layer. Send this KV to the next
        rank."""
        with self._lock:
            self._num_projected += 1
            self._pass_on(self._num_projected - 1, self._own_pieces)

    def earlier_rows(self, layer: int) -> KvRows:
        """Return the KV of earlier ranks' tokens in a layer that has been received. The result is valid until
        `attended` is called."""
        with self._lock:
            return self.kv.earlier.rows(layer, self.earlier)

    def earlier_span(self, layer: int) -> Tensor:
        """Return the KV of earlier ranks' tokens in a received layer as one tensor `[T, 2, G, H]`: T tokens, K and V, G
        KV heads of H elements each. The tensor is valid until `attended` is called."""
        with self._lock:
            return self.kv.earlier.span(layer, self.earlier)

    def attended(self, layer: int) -> None:
        """Record that this rank has read the earlier ranks' KV of the layer `layer` for the last time, so that the
        memory of this KV may be reused. Must not be called if there are no earlier ranks."""
        with self._lock:
            self._used(layer)

    def sent(self, header: LinkHeader) -> None:
        """Record that a message of this job was sent. If this was the last use of earlier ranks' KV in the message's
        layer, free this KV."""
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
        """Send an ALIVE message to the next rank if that rank may be waiting for KV of this job. The rank then keeps
        waiting."""
        self._tell(LinkStatus.ALIVE)

    def abort(self) -> None:
        """Send an ABORT message to the next rank, unless all KV of this job has already been queued for that rank. No
        more KV is sent afterwards."""
        self._tell(LinkStatus.ABORT)

    @property
    def _num_pieces(self) -> int:
        """Return the number of pieces per layer that this rank sends."""
        return len(self._earlier_pieces) + len(self._own_pieces)

    def _tell(self, status: LinkStatus) -> None:
        with self._lock:
            if self.target is not None and self._passing_layer < self._num_layers and not self._aborted:
                self._send(self.target, LinkHeader.bare(self._job.epoch, self._job.number, status), None)
            self._aborted |= status is LinkStatus.ABORT

    def _pass_on(self, layer: int, pieces: Sequence[TokenRange]) -> None:
        """Add `pieces` of `layer`, which have become final. Send all final pieces, up to and including the first layer
        that still has pieces to come."""
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
        """Return the payload of the piece with these tokens in the layer that is being sent."""
        kv = self.kv.own if tokens.start >= self.own.start else self.kv.earlier
        return self.kv.payload(kv.span(self._passing_layer, tokens))

    def _used(self, layer: int) -> None:
        """Count a use of earlier ranks' KV in a layer. After the last use, release its memory for a later layer."""
        self._uses[layer] += 1
        num_sends = len(self._earlier_pieces) if self.target is not None else 0
        if self._uses[layer] == 1 + num_sends:
            del self._uses[layer]
            self.kv.earlier.release(layer)

    def _header(self, layer: int, tokens: TokenRange) -> LinkHeader:
        num_bytes = len(tokens) * self.kv.own.layout.row_bytes
        return LinkHeader(self._job.epoch, self._job.number, layer, tokens, LinkStatus.DATA, num_bytes)


def _pieces(job: Job, place: int) -> list[TokenRange]:
    """Return the pieces in which the chunk of the rank `job.ranks[place]` is sent: one piece if the next rank is the
    last."""
    chunk = job.chunks[place]
    return chunk.split(PIECE_TOKENS) if place + 2 < len(job.ranks) else [chunk]
