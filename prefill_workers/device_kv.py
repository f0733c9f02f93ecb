"""One job's KV where a rank computes with it: the memory that links and pushes use, or a device's, layer by layer.

A rank's KV travels from and to home memory, which `prefill_workers.relay` and the outlet read and write. Where the
device computes in home memory, attention reads it there too (`HomeKv`). Where it does not (`DeviceKv`), each layer

    stores    the chunk's own rows home as soon as they are projected, before they are pushed and passed on
    fetches   the cached prefix while the own rows are attended to, and earlier ranks' rows once they have arrived

so that the device holds one layer of a job's KV, however many layers there are. `prefill_workers.chain` uses it, on the
engine's thread.
"""

from typing import Protocol

from torch import Tensor

from baton.types import TokenRange
from modeling.device.port import Device, Transfer
from modeling.forward.decoder import Span
from modeling.kv.buffers import BufferSpan, KvBuffer, KvRows, LayerBuffers
from prefill_workers.job import Job
from prefill_workers.relay import Relay


class JobKv(Protocol):
    """What a chain's forward needs of the job's KV. Used by one thread, layer after layer."""

    @property
    def span(self) -> Span:
        """Return the span of the rank's own tokens."""

    def own_rows(self, layer: int) -> KvRows:
        """Return the own tokens' rows of the layer that was projected last, and see to it that they are home."""

    def other_rows(self, layer: int) -> list[KvRows]:
        """Return the rows of the cached prefix and of earlier ranks, which have arrived; to be read before `leave`."""

    def leave(self, layer: int) -> None:
        """Note that attention to the layer has ended."""

    def close(self) -> None:
        """Free what the job has on the device. The job computes no more. Idempotent."""


class HomeKv:
    """A JobKv that is read where it arrives."""

    def __init__(self, job: Job, relay: Relay, own_kv: KvBuffer) -> None:
        self.span: Span = BufferSpan(own_kv, relay.own)
        self._job, self._relay, self._own_kv = job, relay, own_kv

    def own_rows(self, layer: int) -> KvRows:
        """Return the rows in the buffer that is pushed."""
        return self._own_kv.rows(layer, self._relay.own)

    def other_rows(self, layer: int) -> list[KvRows]:
        """Return the rows in the prefix store and in the relay's memory."""
        rows = [piece.rows(layer, tokens) for piece, tokens in self._job.cached_pieces]
        return [*rows, self._relay.earlier_rows(layer)] if len(self._relay.earlier) else rows

    def leave(self, layer: int) -> None:
        """Do nothing: the relay frees what it holds."""

    def close(self) -> None:
        """Do nothing: nothing is held but what the relay and the outlet hold."""


class DeviceKv:
    """A JobKv in a device's memory. Implements Span for the layer that is projected."""

    def __init__(self, job: Job, relay: Relay, own_kv: KvBuffer, device: Device) -> None:
        layout = own_kv.layout
        self._relay, self._own_kv, self._link = relay, own_kv, device.link
        self._own = LayerBuffers(layout, relay.own, device.buffer)
        self._earlier = LayerBuffers(layout, relay.earlier, device.buffer)
        self._cached = [
            (piece, tokens, LayerBuffers(layout, tokens, device.buffer)) for piece, tokens in job.cached_pieces
        ]
        self._fetching: Transfer | None = None
        """The fetch of the cached prefix of the layer that was projected last."""
        self._has_earlier = False
        """Whether that layer's rows of earlier ranks are on the device."""

    @property
    def span(self) -> Span:
        """Return the span of the rank's own tokens."""
        return self

    @property
    def tokens(self) -> TokenRange:
        """Return the positions of the rank's own tokens."""
        return self._relay.own

    def own(self, layer: int) -> Tensor:
        """Return the device's memory for the layer's own K and V."""
        return self._own.span(layer, self.tokens)

    def own_rows(self, layer: int) -> KvRows:
        """Store the rows home, begin to fetch the cached prefix, and return the rows on the device."""
        self._link.store([(self._own_kv.span(layer, self.tokens), self.own(layer))]).result()
        if self._cached:
            copies = [(there.span(layer, tokens), piece.span(layer, tokens)) for piece, tokens, there in self._cached]
            self._fetching = self._link.fetch(copies)
        return self._own.rows(layer, self.tokens)

    def other_rows(self, layer: int) -> list[KvRows]:
        """Return the cached prefix, which is being fetched, and fetch the rows of earlier ranks."""
        rows = [there.rows(layer, tokens) for _, tokens, there in self._cached]
        earlier = self._relay.earlier
        if len(earlier):
            self._has_earlier = True
            home = self._relay.earlier_span(layer)
            self._link.fetch([(self._earlier.span(layer, earlier), home)]).result()  # the relay may free them then
            rows.append(self._earlier.rows(layer, earlier))
        if self._fetching is not None:
            self._fetching.join()
        return rows

    def leave(self, layer: int) -> None:
        """Free the layer's memory on the device for the next one."""
        self._own.release(layer)
        if self._fetching is not None:  # the last layer may not attend
            self._fetching.wait()
        for *_, there in self._cached:
            there.release(layer)
        if self._has_earlier:
            self._earlier.release(layer)
            self._has_earlier = False

    def close(self) -> None:
        """Free the device's memory, once nothing is being copied to it."""
        if self._fetching is not None:
            self._fetching.wait()
        for buffers in (self._own, self._earlier, *(there for *_, there in self._cached)):
            buffers.drop()


def kv_of(job: Job, relay: Relay, own_kv: KvBuffer, device: Device) -> JobKv:
    """Return the job's KV as that device computes with it."""
    return HomeKv(job, relay, own_kv) if device.is_home else DeviceKv(job, relay, own_kv, device)
