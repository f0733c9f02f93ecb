"""Access to one job's KV in the memory in which a rank computes: host memory or, layer by layer, device memory.

`prefill_workers.kv_pipeline` receives KV into its memory and sends it from there. KV is pushed to slots from host
memory. KV rows are the keys and values of some tokens; a rank's own rows are those of the tokens that it computes.
There are three cases:

    HomeKv      The device computes in host memory, and attention reads KV there.
    StagedKv    Links send from and receive into host memory. The device holds one layer of a job's KV at a time.
    LinkedKv    Links send from and receive into device memory. The rows of this rank and of earlier ranks stay there
                until they are used and sent. The cached prefix is copied to the device layer by layer. Own rows are
                copied to host memory, from which they are pushed.

With StagedKv, each layer is copied in both directions:

    stores    Copies of own rows to host memory. A layer's own rows are copied as soon as they are projected, before
              they are pushed and sent to the next rank.
    fetches   Copies to the device. The cached prefix is copied while attention over own rows is computed. The rows of
              earlier ranks are copied when they have arrived.

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
    """Interface through which a chain's forward pass accesses the KV of a job. Used by one thread, one layer after
    another."""

    @property
    def span(self) -> Span:
        """Return the memory into which the K and V of the rank's own tokens are written."""

    def own_rows(self, layer: int) -> KvRows:
        """Return the KV of the rank's own tokens in `layer`, the layer that was projected last. When this call returns,
        links and pushes may send this KV."""

    def other_rows(self, layer: int) -> list[KvRows]:
        """Return this layer's KV of the tokens before the rank's own: the cached prefix, and the tokens that earlier
        ranks compute. The KV of earlier ranks must have arrived. The result is valid until `leave` is called for this
        layer."""

    def leave(self, layer: int) -> None:
        """Record that attention of this layer is complete and that the layer's KV is not read any more."""

    def close(self) -> None:
        """Free the job's memory on the device. Call it when the job has no more computations. Idempotent."""


class HomeKv:
    """Access to a job's KV for a device that computes in host memory. Attention reads KV, without copies, from the
    memory in which it arrives."""

    def __init__(self, pipeline: KvPipeline) -> None:
        self.span: Span = BufferSpan(pipeline.kv.own, pipeline.own)
        self._pipeline = pipeline

    def own_rows(self, layer: int) -> KvRows:
        """Return the KV of the rank's own tokens in this layer. The result is a view of the buffer from which the KV is
        pushed to the slot."""
        return self._pipeline.kv.own.rows(layer, self._pipeline.own)

    def other_rows(self, layer: int) -> list[KvRows]:
        """Return this layer's KV of the tokens before the rank's own. The KV of the cached prefix is in the prefix
        store. The KV that earlier ranks computed is in the memory of the KvPipeline."""
        rows = [piece.rows(layer, tokens) for piece, tokens in self._pipeline.kv.job.cached_pieces]
        return [*rows, self._pipeline.earlier_rows(layer)] if len(self._pipeline.earlier) else rows

    def leave(self, layer: int) -> None:
        """Notify the KvPipeline that this rank does not read the earlier ranks' KV of this layer any more. The
        KvPipeline may then free the memory of this KV."""
        if len(self._pipeline.earlier):
            self._pipeline.attended(layer)

    def close(self) -> None:
        """Do nothing, because this object owns no memory: all KV buffers belong to the KvPipeline and the KvSender."""


class FetchedPrefix:
    """Copy of a job's cached prefix on the device. It holds one layer at a time."""

    def __init__(self, kv: RankKv, device: Device) -> None:
        self._link = device.link
        self._pieces = [
            (piece, tokens, LayerBuffers(kv.own.layout, tokens, device.buffer))
            for piece, tokens in kv.job.cached_pieces
        ]
        self._fetching: Transfer | None = None
        """Most recently started transfer of the cached prefix to the device; None before the first transfer."""

    def fetch(self, layer: int) -> None:
        if self._pieces:
            copies = [(there.span(layer, tokens), piece.span(layer, tokens)) for piece, tokens, there in self._pieces]
            # Queued kernels may still read the last layer in the same memory.
            self._fetching = self._link.fetch(copies, after=self._link.queued())

    def rows(self, layer: int) -> list[KvRows]:
        """Return the KV of the cached prefix in this layer, on the device. The copy to the device may not be complete,
        so call `join` before computing with this KV."""
        return [there.rows(layer, tokens) for _, tokens, there in self._pieces]

    def join(self) -> None:
        """Make later computations of this thread on the device wait until the copy is complete."""
        if self._fetching is not None:
            self._fetching.join()

    def leave(self, layer: int) -> None:
        """Free the memory of this layer, so that it can hold the next layer."""
        if self._fetching is not None:  # the last layer may not attend
            self._fetching.wait()
        for *_, there in self._pieces:
            there.release(layer)

    def close(self) -> None:
        """Wait for the last copy to the device, and free the device memory of the prefix."""
        if self._fetching is not None:
            self._fetching.wait()
        for *_, there in self._pieces:
            there.drop()


class StagedKv:
    """Access to a job's KV in device memory, for links that send from and receive into host memory. The device holds
    one layer at a time. Implements Span: the forward pass writes the new K and V of the current layer into this
    object's memory."""

    def __init__(self, pipeline: KvPipeline, device: Device) -> None:
        layout = pipeline.kv.own.layout
        self._pipeline, self._own_kv, self._link = pipeline, pipeline.kv.own, device.link
        self._own = LayerBuffers(layout, pipeline.own, device.buffer)
        self._earlier = LayerBuffers(layout, pipeline.earlier, device.buffer)
        self._prefix = FetchedPrefix(pipeline.kv, device)
        self._has_earlier = False
        """True if the KV that earlier ranks computed in the current layer is on the device."""

    @property
    def span(self) -> Span:
        """Return the memory into which the K and V of the rank's own tokens are written."""
        return self

    @property
    def tokens(self) -> TokenRange:
        """Return the range of prompt positions of the rank's own tokens."""
        return self._pipeline.own

    def own(self, layer: int) -> Tensor:
        """Return the device memory for K and V of the rank's own tokens in this layer."""
        return self._own.span(layer, self.tokens)

    def own_rows(self, layer: int) -> KvRows:
        """Copy the KV of the rank's own tokens in this layer to host memory, and start the copy of the cached prefix to
        the device. Return the KV of the own tokens on the device."""
        self._link.store([(self._own_kv.span(layer, self.tokens), self.own(layer))]).result()
        self._prefix.fetch(layer)
        return self._own.rows(layer, self.tokens)

    def other_rows(self, layer: int) -> list[KvRows]:
        """Return this layer's KV of the tokens before the rank's own, in device memory. The copy of the cached prefix
        to the device was started by `own_rows`. The KV of earlier ranks is copied during this call."""
        rows = self._prefix.rows(layer)
        earlier = self._pipeline.earlier
        if len(earlier):
            self._has_earlier = True
            home = self._pipeline.earlier_span(layer)
            copies = [(self._earlier.span(layer, earlier), home)]
            # Queued kernels may still read the last layer in the same memory. The wait lets the pipeline free `home`.
            self._link.fetch(copies, after=self._link.queued()).result()
            rows.append(self._earlier.rows(layer, earlier))
        self._prefix.join()
        return rows

    def leave(self, layer: int) -> None:
        """Free the layer's KV on the device, so that the memory can hold the next layer. Notify the KvPipeline that the
        earlier ranks' KV of this layer is not read any more. The KvPipeline may then free the host memory of this
        KV."""
        self._own.release(layer)
        self._prefix.leave(layer)
        if self._has_earlier:
            self._earlier.release(layer)
            self._has_earlier = False
        if len(self._pipeline.earlier):
            self._pipeline.attended(layer)

    def close(self) -> None:
        """Wait for running copies, and free the job's device memory."""
        self._prefix.close()
        self._own.drop()
        self._earlier.drop()


class LinkedKv:
    """Access to a job's KV in device memory, for links that send from and receive into device memory."""

    def __init__(self, pipeline: KvPipeline, device: Device) -> None:
        self.span: Span = BufferSpan(pipeline.kv.own, pipeline.own)
        self._pipeline, self._own_kv, self._link = pipeline, pipeline.kv.own, device.link
        self._prefix = FetchedPrefix(pipeline.kv, device)
        self._left: int | None = None
        """Layer for which `leave` was called while the device may still read the KV of earlier ranks; None if no such
        layer exists."""

    def own_rows(self, layer: int) -> KvRows:
        """Start the copy of the layer's cached prefix to the device. Block until the device has written the KV of the
        rank's own tokens in this layer, then return this KV. Links may send it after this call."""
        self._prefix.fetch(layer)
        self._link.store(()).result()
        self._read_last()
        return self._own_kv.rows(layer, self._pipeline.own)

    def other_rows(self, layer: int) -> list[KvRows]:
        """Return this layer's KV of the tokens before the rank's own, in device memory. The copy of the cached prefix
        to the device was started by `own_rows`. The KV of earlier ranks needs no copy, because links receive it
        directly into device memory."""
        rows = self._prefix.rows(layer)
        if len(self._pipeline.earlier):
            rows.append(self._pipeline.earlier_rows(layer))
        self._prefix.join()
        return rows

    def leave(self, layer: int) -> None:
        """Free the cached prefix of this layer, so that the memory can hold the next layer. The KV of earlier ranks
        is not freed yet, because the device may still read it. Links do not wait for the device, and could overwrite
        freed memory too early."""
        self._prefix.leave(layer)
        self._left = layer

    def close(self) -> None:
        """Free the device memory of the cached prefix. Block until the device no longer reads the job's KV. The caller
        may then free the job's memory."""
        self._prefix.close()
        self._link.store(()).result()
        self._read_last()

    def _read_last(self) -> None:
        """Notify the KvPipeline that the device has read all KV of earlier ranks in the layer that was last passed to
        `leave`. Call this after the device has completed this thread's earlier work."""
        if self._left is not None and len(self._pipeline.earlier):
            self._pipeline.attended(self._left)
        self._left = None


def kv_of(pipeline: KvPipeline, device: Device) -> JobKv:
    """Return the object through which the forward pass on this device accesses the KV of the job of `pipeline`."""
    if device.is_home:
        return HomeKv(pipeline)
    return (LinkedKv if pipeline.kv.on_device else StagedKv)(pipeline, device)
