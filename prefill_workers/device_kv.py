"""Access to one job's KV in the memory in which a rank computes: host memory or, layer by layer, device memory.

`prefill_workers.kv_pipeline` receives KV into its memory and sends it from there. KV is pushed to slots from host
memory. KV rows are the keys and values of some tokens; a rank's own rows are those of the tokens that it computes.
There are three cases:

    HomeKv      The device computes in host memory, and attention reads KV there.
    StagedKv    Links send from and receive into host memory. The device holds one layer of a job's KV at a time.
    LinkedKv    Links send from and receive into device memory. The rows of this rank and of earlier ranks stay there
                until they are used and sent. The cached prefix is copied to the device layer by layer. Own rows are
                copied to host memory, from which they are pushed.

With StagedKv, each layer is copied in both directions. Host memory for own rows is allocated layer by layer, on the
engine's thread. On CUDA it is pinned, and torch reuses the memory of earlier jobs.

    stores    Copies of own rows to host memory. They begin as soon as a layer's own rows are projected, and run while
              the device attends to these rows. Only the push of the rows, and the next use of their device memory,
              wait for the copy.
    fetches   Copies to the device. The cached prefix is copied while attention over own rows is computed. The rows of
              earlier ranks are copied when they have arrived.

Used by `prefill_workers.chain`, on the engine's thread.
"""

from typing import Protocol

from torch import Tensor

from baton.errors import ResourceExhaustedError
from baton.modeling.device.port import Device, Link
from baton.modeling.forward.decoder import Span
from baton.modeling.kv.buffers import OUT_OF_MEMORY, BufferSpan, KvBuffer, KvRows, LayerBuffers, byte_view
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
        """Return the KV of the rank's own tokens in `layer`, the layer that was projected last. Attention reads it. A
        copy to host memory is begun, if the device has its own memory."""

    def own_bytes(self, layer: int) -> memoryview:
        """Return the bytes of the KV of the rank's own tokens in a layer, in host memory. Waits until its copy to host
        memory is complete. Links may send this KV after this call. Must be called once per layer, in the order of the
        layers."""

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
        self._own = _buffer_of(pipeline.kv)
        self.span: Span = BufferSpan(self._own, pipeline.own)
        self._pipeline = pipeline

    def own_rows(self, layer: int) -> KvRows:
        """Return the KV of the rank's own tokens in this layer. The result is a view of the buffer from which the KV is
        pushed to the slot."""
        return self._own.rows(layer, self._pipeline.own)

    def own_bytes(self, layer: int) -> memoryview:
        """Return a view of the KV of the rank's own tokens in this layer. Does not wait."""
        return self._own.export(layer, self._pipeline.own)

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


class OwnStores:
    """Copies of a job's own rows from the device to host memory, one for each layer."""

    def __init__(self, pipeline: KvPipeline, home: LayerBuffers, link: Link) -> None:
        """`home`: host memory for the own rows of all layers, which the link can access fast."""
        self._home, self._link = home, link
        self._job, self._tokens = pipeline.kv.job, pipeline.own
        self._running: dict[int, Transfer] = {}
        """Copies that `bytes_of` has not waited for yet, by layer."""

    def begin(self, layer: int, there: Tensor) -> None:
        """Begin to copy the own rows of a layer from `there`, on the device, after they are computed. Raises
        ResourceExhaustedError if there is too little host memory."""
        try:
            home = self._home.span(layer, self._tokens)
        except OUT_OF_MEMORY as error:
            what = f"job {self._job.number}: no memory for {len(self._tokens)} tokens of layer {layer}"
            raise ResourceExhaustedError(f"{what}: retry later") from error
        self._running[layer] = self._link.store([(home, there)])

    def bytes_of(self, layer: int) -> memoryview:
        """Wait for the copy of a layer, and return the bytes in host memory. Raises the error of a failed copy."""
        self._running.pop(layer).result()
        return byte_view(self._home.span(layer, self._tokens))

    def join(self, layer: int) -> None:
        """Make later work of this thread on the device wait for the copy of a layer, if it may still be running. That
        work may then overwrite the layer's memory on the device."""
        if layer in self._running:
            self._running[layer].join()

    def wait(self) -> None:
        """Wait until no copy is running. Does not raise the errors of copies. Nothing may be sent afterwards."""
        for copying in self._running.values():
            copying.wait()
        self._running.clear()


class StagedKv:
    """Access to a job's KV in device memory, for links that send from and receive into host memory. The device holds
    one layer at a time. Implements Span: the forward pass writes the new K and V of the current layer into this
    object's memory."""

    def __init__(self, pipeline: KvPipeline, device: Device) -> None:
        home, layout = pipeline.kv.own, pipeline.kv.own.layout
        assert isinstance(home, LayerBuffers), "staged KV is stored layer by layer"
        self._pipeline, self._link = pipeline, device.link
        self._stores = OwnStores(pipeline, home, device.link)
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
        """Start to copy the KV of the rank's own tokens in this layer to host memory, and the cached prefix to the
        device. Return the KV of the own tokens on the device. Attention and the copy read it at the same time."""
        self._stores.begin(layer, self.own(layer))
        self._prefix.fetch(layer)
        return self._own.rows(layer, self.tokens)

    def own_bytes(self, layer: int) -> memoryview:
        """Wait until the KV of the rank's own tokens in this layer is in host memory, and return a view of it."""
        return self._stores.bytes_of(layer)

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
        self._stores.join(layer)  # the next layer is written into the same memory
        self._own.release(layer)
        self._prefix.leave(layer)
        if self._has_earlier:
            self._earlier.release(layer)
            self._has_earlier = False
        if len(self._pipeline.earlier):
            self._pipeline.attended(layer)

    def close(self) -> None:
        """Wait for running copies, and free the job's device memory."""
        self._stores.wait()
        self._prefix.close()
        self._own.drop()
        self._earlier.drop()


class LinkedKv:
    """Access to a job's KV in device memory, for links that send from and receive into device memory."""

    def __init__(self, pipeline: KvPipeline, device: Device) -> None:
        self._own = _buffer_of(pipeline.kv)
        self.span: Span = BufferSpan(self._own, pipeline.own)
        self._pipeline, self._link = pipeline, device.link
        home = LayerBuffers(self._own.layout, pipeline.own, device.home_buffer)
        self._stores = OwnStores(pipeline, home, device.link)
        self._prefix = FetchedPrefix(pipeline.kv, device)
        self._left: int | None = None
        """Layer for which `leave` was called while the device may still read the KV of earlier ranks; None if no such
        layer exists."""

    def own_rows(self, layer: int) -> KvRows:
        """Start to copy the KV of the rank's own tokens in this layer to host memory, and the cached prefix to the
        device. Return the KV of the own tokens on the device."""
        self._stores.begin(layer, self._own.span(layer, self._pipeline.own))
        self._prefix.fetch(layer)
        return self._own.rows(layer, self._pipeline.own)

    def own_bytes(self, layer: int) -> memoryview:
        """Wait until the KV of the rank's own tokens in this layer is in host memory, and return a view of it. Links
        may then send the KV from the device, because the device has written it before the copy."""
        data = self._stores.bytes_of(layer)
        self._read_last()  # the copy began after the work on the layer before
        return data

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
        self._stores.wait()
        self._prefix.close()
        self._link.queued().result()
        self._read_last()

    def _read_last(self) -> None:
        """Notify the KvPipeline that the device has read all KV of earlier ranks in the layer that was last passed to
        `leave`. Call this after the device has completed this thread's earlier work."""
        if self._left is not None and len(self._pipeline.earlier):
            self._pipeline.attended(self._left)
        self._left = None


def _buffer_of(kv: RankKv) -> KvBuffer:
    assert isinstance(kv.own, KvBuffer), "the rank computes into one buffer for all layers"
    return kv.own


def kv_of(pipeline: KvPipeline, device: Device) -> JobKv:
    """Return the object through which the forward pass on this device accesses the KV of the job of `pipeline`."""
    if device.is_home:
        return HomeKv(pipeline)
    return (LinkedKv if pipeline.kv.on_device else StagedKv)(pipeline, device)
