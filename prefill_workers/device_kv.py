"""Access to one job's KV in the memory in which a rank computes: host memory or, layer by layer, device memory.

`prefill_workers.kv_pipeline` receives KV into its memory and sends it from there. Pushes are sent from host memory.
There are three cases:

    HomeKv      the device computes in host memory: attention reads KV there
    StagedKv    links transfer host memory: the device holds one layer of a job's KV, regardless of the number of layers
    LinkedKv    links transfer device memory: own and earlier ranks' rows stay there, in as many layers as one rank may
                be ahead of the next. Only the cached prefix is copied to the device. Own rows are copied to host
                memory to be pushed

With StagedKv, each layer

    stores    the chunk's own rows in host memory as soon as they are projected, before they are pushed and passed on
    fetches   the cached prefix while the own rows are attended to, and earlier ranks' rows once they have arrived

Used by `prefill_workers.chain`, on the engine's thread.
"""

from typing import Protocol

from torch import Tensor

from baton.modeling.device.port import Device
from baton.modeling.forward.decoder import Span
from baton.modeling.kv.buffers import BufferSpan, KvRows, LayerBuffers
from baton.modeling.kv.transfers import Transfer
from baton.types import TokenRange
from prefill_workers.kv_pipeline import KvPipeline, RankKv


class JobKv(Protocol):
    """Access of a chain's forward pass to the job's KV. Used by one thread, layer after layer."""

    @property
    def span(self) -> Span:
        """Return the span of the rank's own tokens."""

    def own_rows(self, layer: int) -> KvRows:
        """Return the KV rows of the rank's own tokens in `layer`, which was projected last. Links and pushes may then
        send them."""

    def other_rows(self, layer: int) -> list[KvRows]:
        """Return the KV rows of the cached prefix and of earlier ranks, which must have arrived. They are valid until
        `leave`."""

    def leave(self, layer: int) -> None:
        """Mark attention to the layer as complete: its rows are not read any more."""

    def close(self) -> None:
        """Free the job's memory on the device. Call this when the job computes no more. Idempotent."""


class HomeKv:
    """JobKv for a device that computes in host memory: rows are read where they arrive."""

    def __init__(self, pipeline: KvPipeline) -> None:
        self.span: Span = BufferSpan(pipeline.kv.own, pipeline.own)
        self._pipeline = pipeline

    def own_rows(self, layer: int) -> KvRows:
        """Return the rows in the buffer from which they are pushed."""
        return self._pipeline.kv.own.rows(layer, self._pipeline.own)

    def other_rows(self, layer: int) -> list[KvRows]:
        """Return the rows in the prefix store and in the pipeline's memory."""
        rows = [piece.rows(layer, tokens) for piece, tokens in self._pipeline.kv.job.cached_pieces]
        return [*rows, self._pipeline.earlier_rows(layer)] if len(self._pipeline.earlier) else rows

    def leave(self, layer: int) -> None:
        """Notify the pipeline, which frees the layer's memory."""
        if len(self._pipeline.earlier):
            self._pipeline.attended(layer)

    def close(self) -> None:
        """Do nothing: all memory belongs to the pipeline and the sender."""


class FetchedPrefix:
    """Copy of a job's cached prefix on a device, one layer at a time."""

    def __init__(self, kv: RankKv, device: Device) -> None:
        self._link = device.link
        self._pieces = [
            (piece, tokens, LayerBuffers(kv.own.layout, tokens, device.buffer))
            for piece, tokens in kv.job.cached_pieces
        ]
        self._fetching: Transfer | None = None
        """Copy to the device of the layer that was requested last."""

    def fetch(self, layer: int) -> None:
        if self._pieces:
            copies = [(there.span(layer, tokens), piece.span(layer, tokens)) for piece, tokens, there in self._pieces]
            self._fetching = self._link.fetch(copies)

    def rows(self, layer: int) -> list[KvRows]:
        """Return the rows of the layer. Call `join` before computing with them: they may not have arrived yet."""
        return [there.rows(layer, tokens) for _, tokens, there in self._pieces]

    def join(self) -> None:
        """Make this thread's later computations on the device wait for the copy."""
        if self._fetching is not None:
            self._fetching.join()

    def leave(self, layer: int) -> None:
        """Free the layer's memory for the next one."""
        if self._fetching is not None:  # the last layer may not attend
            self._fetching.wait()
        for *_, there in self._pieces:
            there.release(layer)

    def close(self) -> None:
        """Wait for the last copy, and free all memory."""
        if self._fetching is not None:
            self._fetching.wait()
        for *_, there in self._pieces:
            there.drop()


class StagedKv:
    """JobKv in device memory, for links that transfer host memory. Implements Span for the layer that is being
    projected."""

    def __init__(self, pipeline: KvPipeline, device: Device) -> None:
        layout = pipeline.kv.own.layout
        self._pipeline, self._own_kv, self._link = pipeline, pipeline.kv.own, device.link
        self._own = LayerBuffers(layout, pipeline.own, device.buffer)
        self._earlier = LayerBuffers(layout, pipeline.earlier, device.buffer)
        self._prefix = FetchedPrefix(pipeline.kv, device)
        self._has_earlier = False
        """True if the device holds the earlier ranks' rows of the current layer."""

    @property
    def span(self) -> Span:
        """Return the span of the rank's own tokens."""
        return self

    @property
    def tokens(self) -> TokenRange:
        """Return the positions of the rank's own tokens."""
        return self._pipeline.own

    def own(self, layer: int) -> Tensor:
        """Return the device's memory for the layer's own K and V."""
        return self._own.span(layer, self.tokens)

    def own_rows(self, layer: int) -> KvRows:
        """Copy the rows to host memory, begin to fetch the cached prefix, and return the rows on the device."""
        self._link.store([(self._own_kv.span(layer, self.tokens), self.own(layer))]).result()
        self._prefix.fetch(layer)
        return self._own.rows(layer, self.tokens)

    def other_rows(self, layer: int) -> list[KvRows]:
        """Fetch the earlier ranks' rows, and return them and the rows of the cached prefix, whose copy began in
        `own_rows`."""
        rows = self._prefix.rows(layer)
        earlier = self._pipeline.earlier
        if len(earlier):
            self._has_earlier = True
            home = self._pipeline.earlier_span(layer)
            self._link.fetch([(self._earlier.span(layer, earlier), home)]).result()  # the pipeline may then free them
            rows.append(self._earlier.rows(layer, earlier))
        self._prefix.join()
        return rows

    def leave(self, layer: int) -> None:
        """Free the layer's memory on the device for the next one, and notify the pipeline, which frees host memory."""
        self._own.release(layer)
        self._prefix.leave(layer)
        if self._has_earlier:
            self._earlier.release(layer)
            self._has_earlier = False
        if len(self._pipeline.earlier):
            self._pipeline.attended(layer)

    def close(self) -> None:
        """Wait for running copies, and free the device's memory."""
        self._prefix.close()
        self._own.drop()
        self._earlier.drop()


class LinkedKv:
    """JobKv in device memory, for links that receive into this memory and send from it."""

    def __init__(self, pipeline: KvPipeline, device: Device) -> None:
        self.span: Span = BufferSpan(pipeline.kv.own, pipeline.own)
        self._pipeline, self._own_kv, self._link = pipeline, pipeline.kv.own, device.link
        self._prefix = FetchedPrefix(pipeline.kv, device)
        self._left: int | None = None
        """Layer for which `leave` was called, but whose earlier rows the device may still read; None if no such layer
        exists."""

    def own_rows(self, layer: int) -> KvRows:
        """Begin to fetch the cached prefix, and return the rows once the device has written them. Links may then send
        them."""
        self._prefix.fetch(layer)
        self._link.store(()).result()
        self._read_last()
        return self._own_kv.rows(layer, self._pipeline.own)

    def other_rows(self, layer: int) -> list[KvRows]:
        """Return the rows of the cached prefix, whose copy began in `own_rows`, and the rows that the links received in
        place."""
        rows = self._prefix.rows(layer)
        if len(self._pipeline.earlier):
            rows.append(self._pipeline.earlier_rows(layer))
        self._prefix.join()
        return rows

    def leave(self, layer: int) -> None:
        """Free the prefix's layer for the next one, but not yet the rows of earlier ranks: links are not synchronized
        with the device's computations, and could overwrite these rows while the device still reads them."""
        self._prefix.leave(layer)
        self._left = layer

    def close(self) -> None:
        """Free the prefix's memory, and block until the device no longer reads the job's memory, which may then be
        freed."""
        self._prefix.close()
        self._link.store(()).result()
        self._read_last()

    def _read_last(self) -> None:
        """Notify the pipeline that the rows of the layer passed to `leave` are not read any more. Call this after the
        device has completed this thread's earlier work."""
        if self._left is not None and len(self._pipeline.earlier):
            self._pipeline.attended(self._left)
        self._left = None


def kv_of(pipeline: KvPipeline, device: Device) -> JobKv:
    """Return the JobKv of the pipeline's job for this device."""
    if device.is_home:
        return HomeKv(pipeline)
    return (LinkedKv if pipeline.kv.on_device else StagedKv)(pipeline, device)
