"""Client for the lease methods of a KvReceiver: reserve, renew, commit and abort. Arguments and results are Baton's own
types. A lease reserves a slot for the KV of one sequence, and expires if it is not renewed within its TTL.

Used by `orchestrator.workers.client`, and by the last rank of a chain in `prefill_workers.servicer`, which commits the
lease. The KV itself is pushed by `baton.transport.kv_sender`. Used on the asyncio loop.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import grpc

from baton.proto_types import sampled_to_proto
from baton.transport.kv_sink import ReserveSpec
from baton.transport.proto_types import lease_from_proto, lease_ref_to_proto
from baton.transport.status_interceptor import translate_rpc_errors
from baton.types import Lease, LeaseRef, ReserveNumber, SampledToken
from baton.v1 import kv_pb2
from baton.v1.kv_pb2_grpc import KvReceiverStub

TranslateErrors = Callable[[], AbstractContextManager[None]]
"""Function that returns a context manager, which converts grpc's errors to BatonErrors."""


class KvClient:
    """Client of one KvReceiver. `errors` returns a context manager that converts gRPC errors to the BatonErrors that
    the receiver raised."""

    def __init__(
        self, channel: grpc.aio.Channel, *, timeout_s: float = 10.0, errors: TranslateErrors = translate_rpc_errors
    ) -> None:
        """Create a client that uses `channel`. `timeout_s` is the timeout in seconds of all methods except `commit`.
        `commit` has its own timeout, because it may have to wait for pushes."""
        self._stub = KvReceiverStub(channel)
        self._timeout_s = timeout_s
        self._errors = errors

    async def reserve(self, spec: ReserveSpec, layout_fingerprint: str) -> Lease:
        """Reserve a slot and return the lease on it. Raises ResourceExhaustedError if no slot is free, and
        LayoutMismatchError if the receiver has another KV layout."""
        request = kv_pb2.ReserveRequest(**vars(spec), layout_fingerprint=layout_fingerprint)
        with self._errors():
            return lease_from_proto(await self._stub.Reserve(request, timeout=self._timeout_s))

    async def renew(self, ref: LeaseRef, ttl_s: float) -> None:
        """Extend a lease to `ttl_s` seconds from now. Raises StaleStampError or LeaseExpiredError if the lease has
        already ended."""
        request = kv_pb2.RenewRequest(lease=lease_ref_to_proto(ref), ttl_s=ttl_s)
        with self._errors():
            await self._stub.Renew(request, timeout=self._timeout_s)

    async def commit(self, ref: LeaseRef, firsts: Sequence[SampledToken], *, timeout_s: float | None = None) -> int:
        """Wait until all KV of a lease has arrived, and record the first token of each choice. Return the number of
        bytes of KV in its slot.

        Waits until the KV of all writers has arrived, for at most `timeout_s` seconds (None: no separate limit) and at
        most the lease's TTL. Raises IncompletePushError if KV is still missing then. May be called again.
        """
        tokens = [sampled_to_proto(token) for token in firsts]
        request = kv_pb2.CommitRequest(lease=lease_ref_to_proto(ref), first=tokens)
        with self._errors():
            reply = await self._stub.Commit(request, timeout=timeout_s)
        return reply.num_bytes

    async def abort(self, ref: LeaseRef) -> None:
        """End a lease and free its slot. Does nothing when the lease has already ended. Idempotent."""
        with self._errors():
            await self._stub.Abort(kv_pb2.AbortRequest(lease=lease_ref_to_proto(ref)), timeout=self._timeout_s)

    async def abort_reserve(self, number: ReserveNumber) -> None:
        """Cancel the Reserve call with the given number, and end its lease. This works even if the call is still
        running or has not arrived at the server yet."""
        with self._errors():
            await self._stub.Abort(kv_pb2.AbortRequest(number=number), timeout=self._timeout_s)
