"""Server of the gRPC service baton.v1.KvReceiver. It checks each pushed piece of KV, and passes pieces and lease calls
to a sink, which stores KV in slots. A lease is a claim on a slot, and expires if it is not renewed within its TTL.

Reserve, Renew and Abort are called by `orchestrator.workers.client`, Push and PushShared by
`baton.transport.kv_sender`, and Commit by `baton.transport.kv_client`. The sink is `generate_workers.slots.table`.

The server runs on the process's asyncio loop. A piece has at most a few MiB, so checking and copying it on the loop
takes less time than passing it to a thread. Copying a piece to a device takes longer, and the sink does it outside the
loop. A push is answered when all copies are complete.
"""

import math
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import ExitStack
from functools import partial
from operator import methodcaller
from typing import Any

import grpc
import xxhash

from baton.errors import ByteCountError, ChecksumError, InvalidArgumentError, LayoutMismatchError
from baton.process.clock import Clock, SystemClock
from baton.proto_types import range_from_proto, read, sampled_from_proto
from baton.transport.kv_frame import Piece, decode_piece
from baton.transport.kv_sink import KvPrefixes, KvSink, PushTarget, ReserveSpec
from baton.transport.proto_types import lease_ref_from_proto, lease_to_proto
from baton.transport.reserve_book import ReserveBook
from baton.transport.shared_memory import Turns, map_memory, payload_at
from baton.types import KvLayout, Lease, LeaseRef, ReserveNumber
from baton.v1 import common_pb2, kv_pb2

_NamesLease = kv_pb2.RenewRequest | kv_pb2.KvPieceHeader | kv_pb2.CommitRequest | kv_pb2.AbortRequest
Context = grpc.aio.ServicerContext[Any, Any]

SERVICE = "baton.v1.KvReceiver"
MAX_TTL_S = 3600.0
"""Maximum TTL of a lease in seconds. It limits the time for which a lost lease occupies its slot."""
MAX_REPLY_S = 0.5
"""Maximum time in seconds that a Commit reserves for sending its answer. The Commit stops waiting for missing KV when
only the reserved time is left until the caller's deadline. The reserved time is the shorter of two times: this maximum,
and a quarter of the time from the arrival of the Commit to the deadline."""


class KvReceiverServicer:
    """Serves baton.v1.KvReceiver with a sink. Register it with `add_to` on a server created by
    `baton.transport.channel`, which converts the raised errors to gRPC statuses.

    The servicer remembers the latest Reserve calls by their numbers, so that a caller that did not receive the answer
    can repeat or undo its call. It keeps no other state between calls. If the argument `prefixes` is given, this object
    grants the leases for prompts with cached blocks, and fills their slots from the node's prefix cache. If `prefixes`
    is None, the node has no prefix cache.
    """

    def __init__(self, sink: KvSink, prefixes: KvPrefixes | None = None, *, clock: Clock | None = None) -> None:
        self._sink = sink
        self._prefixes = prefixes
        self._reserves = ReserveBook(clock or SystemClock())

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register the service's six methods with the server, before the server starts. Push uses a deserializer that
        does not copy payloads."""
        unary, write = grpc.unary_unary_rpc_method_handler, methodcaller("SerializeToString")
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "Reserve": unary(self.reserve, kv_pb2.ReserveRequest.FromString, write),
            "Renew": unary(self.renew, kv_pb2.RenewRequest.FromString, write),
            "Push": grpc.stream_unary_rpc_method_handler(self.push, decode_piece, write),
            "PushShared": grpc.stream_stream_rpc_method_handler(
                self.push_shared, kv_pb2.SharedPieces.FromString, write
            ),
            "Commit": unary(self.commit, kv_pb2.CommitRequest.FromString, write),
            "Abort": unary(self.abort, kv_pb2.AbortRequest.FromString, write),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))

    async def reserve(self, request: kv_pb2.ReserveRequest, context: Context) -> common_pb2.Lease:
        """Serve Reserve: reserve slots for KV in the sink's layout, and return the lease.

        A repeated call with the same number returns the same lease. Raises LayoutMismatchError if the caller's layout
        differs from the sink's, InvalidArgumentError for an invalid field, LeaseError if the Reserve call with this
        number was aborted, and the errors of the sink's `reserve`.
        """
        _check_layout(self._sink.layout, request.layout_fingerprint)
        spec = _reserve_spec(request)
        reserve = partial(self._reserve, spec)
        number = spec.number
        lease = await (reserve() if number is None else self._reserves.grant(number, reserve, self._sink.abort))
        return lease_to_proto(lease)

    async def _reserve(self, spec: ReserveSpec) -> Lease:
        if self._prefixes is not None and (spec.prefix_blocks or spec.prefills_locally):
            return await self._prefixes.reserve(spec)
        if spec.prefills_locally:
            raise InvalidArgumentError("prefills_locally: nothing is cached here: open a stream without a lease")
        return self._sink.reserve(spec)

    async def renew(self, request: kv_pb2.RenewRequest, context: Context) -> kv_pb2.RenewReply:
        """Serve Renew: extend a lease to `ttl_s` seconds from now. Raises StaleStampError or LeaseExpiredError if the
        lease has already ended."""
        self._sink.renew(_lease_ref(request), _checked_ttl(request.ttl_s))
        return kv_pb2.RenewReply()

    async def push(self, pieces: AsyncIterator[Piece], context: Context) -> kv_pb2.PushReply:
        """Serve Push: write pieces to a slot until the stream ends or a piece is rejected. Return the numbers of pieces
        and bytes when all pieces are in the slot. The call counts as a writer of the slot from its first piece until it
        ends."""
        with ExitStack() as stack:
            writer = _Writer(self._sink, stack)
            async for header, payload in pieces:
                await writer.write(header, payload)
            await writer.settle()
        return writer.reply

    async def push_shared(
        self, messages: AsyncIterator[kv_pb2.SharedPieces], context: Context
    ) -> AsyncGenerator[kv_pb2.SharedAnswer, None]:
        """Serve PushShared: write pieces to a slot. Their payloads are in shared memory, which the first message names;
        later messages contain only the location of each piece.

        A message may request an answer. The answer is sent when all pieces so far have been copied, and the sender may
        then reuse their memory. If this process cannot map the shared memory, it sends a single answer that says so.
        """
        incoming = aiter(messages)
        opening = await anext(incoming, kv_pb2.SharedPieces())
        memory = map_memory(opening.memory)
        yield kv_pb2.SharedAnswer(mapped=memory is not None)
        if memory is None:
            return
        num_unanswered, turns = 0, Turns()
        with ExitStack() as stack:
            writer = _Writer(self._sink, stack)
            async for message in incoming:
                for piece in message.pieces:
                    await writer.write(piece.header, payload_at(memory, piece))
                    await turns.take(piece.num_bytes)
                num_unanswered += len(message.pieces)
                if message.answer:
                    yield kv_pb2.SharedAnswer(num_pieces=num_unanswered)
                    num_unanswered = 0
            await writer.settle()
        yield kv_pb2.SharedAnswer(total=writer.reply)

    async def commit(self, request: kv_pb2.CommitRequest, context: Context) -> kv_pb2.CommitReply:
        """Serve Commit: wait until all KV of a lease has arrived, and record the first token of each choice. Return the
        number of bytes of KV in the lease's slot.

        If KV is missing, the wait ends shortly before the caller's deadline, so that the error that names the missing
        KV can still reach the caller.
        """
        if not request.first:
            raise InvalidArgumentError("first is missing: commit carries each choice's first token")
        firsts = [sampled_from_proto(token) for token in request.first]
        num_bytes = await self._sink.commit(_lease_ref(request), firsts, _wait_s(context))
        return kv_pb2.CommitReply(num_bytes=num_bytes)

    async def abort(self, request: kv_pb2.AbortRequest, context: Context) -> kv_pb2.AbortReply:
        """Serve Abort: end a lease. The request identifies the lease by its slot and stamp, or by the number of its
        Reserve call. Does nothing if the lease has already ended."""
        by_number = request.number and not request.HasField("lease")
        ref = self._reserves.abort(ReserveNumber(request.number)) if by_number else _lease_ref(request)
        if ref is not None:
            self._sink.abort(ref)
        return kv_pb2.AbortReply()


class _Writer:
    """Writes the pieces of one push call to a slot. It registers as a writer of the slot at the first piece, and
    unregisters when `stack` is closed. Each piece is checked against its header and the KV layout before it is
    written."""

    def __init__(self, sink: KvSink, stack: ExitStack) -> None:
        self.reply = kv_pb2.PushReply()
        """Numbers of received pieces and bytes, including duplicates."""
        self._sink = sink
        self._stack = stack
        self._inside: tuple[LeaseRef, PushTarget] | None = None

    async def write(self, header: kv_pb2.KvPieceHeader, payload: memoryview) -> None:
        """Check a piece, pass it to the sink, and count it.

        Raises InvalidArgumentError if the piece and the first piece of the push belong to different leases. Raises
        LayoutMismatchError if the piece's layout differs from the sink's, ByteCountError for a payload of the wrong
        length, and ChecksumError for a damaged payload. Raises the errors of `KvSink.open_push` and `PushTarget.write`.
        """
        ref, layout = _lease_ref(header), self._sink.layout
        _check_layout(layout, header.layout_fingerprint)
        if self._inside is None:
            self._inside = ref, self._stack.enter_context(self._sink.open_push(ref))
        first_ref, target = self._inside
        if ref != first_ref:
            raise InvalidArgumentError(f"a piece for {ref} in a push to {first_ref}: open one push per lease")
        tokens = range_from_proto(header.tokens)
        where = f"layer {header.layer}, tokens [{tokens.start}, {tokens.end}) of slot {ref.slot}"
        expected = len(tokens) * layout.row_bytes
        if payload.nbytes != expected:
            raise ByteCountError(f"{where}: {payload.nbytes} bytes instead of {expected}: push the piece again, whole")
        if xxhash.xxh3_64_intdigest(payload) != header.checksum:
            raise ChecksumError(f"{where}: the payload was damaged on its way: push the piece again")
        is_new = await target.write(header.layer, tokens, payload)
        self.reply.num_bytes += payload.nbytes
        self.reply.num_pieces += 1
        self.reply.num_duplicates += not is_new

    async def settle(self) -> None:
        """Wait until all pieces have been written to the slot. Raises the errors of `PushTarget.settle`."""
        if self._inside is not None:
            await self._inside[1].settle()


def _check_layout(layout: KvLayout, fingerprint: str) -> None:
    if fingerprint != layout.fingerprint:
        raise LayoutMismatchError(
            f"the sender's KV layout is {fingerprint[:32]!r}, this receiver's is {layout.fingerprint!r}: "
            "run the same model and dtype on both sides"
        )


def _lease_ref(message: _NamesLease) -> LeaseRef:
    if not message.HasField("lease"):
        raise InvalidArgumentError(f"{type(message).__name__}.lease is missing: name the slot and its stamp")
    return lease_ref_from_proto(message.lease)


def _reserve_spec(request: kv_pb2.ReserveRequest) -> ReserveSpec:
    if not 1 <= request.num_tokens <= request.capacity_tokens:
        raise InvalidArgumentError(
            f"num_tokens = {request.num_tokens} with capacity_tokens = {request.capacity_tokens}: "
            "reserve at least 1 token, and capacity for all of them"
        )
    _check_blocks(request)
    return read(
        ReserveSpec,
        request,
        ttl_s=_checked_ttl(request.ttl_s),
        num_choices=request.num_choices if request.HasField("num_choices") else 1,
        prefix_blocks=tuple(request.prefix_blocks),
        number=ReserveNumber(request.number) if request.number else None,
    )


def _check_blocks(request: kv_pb2.ReserveRequest) -> None:
    """Raise InvalidArgumentError if prefix blocks extend beyond the tokens to be pushed, or if a local prefill would
    have no token left to compute."""
    num_blocks, most = len(request.prefix_blocks), request.num_tokens - request.prefills_locally
    if num_blocks and not 1 <= request.block_tokens <= most // num_blocks:
        raise InvalidArgumentError(
            f"prefix_blocks: {num_blocks} blocks of block_tokens = {request.block_tokens}: "
            f"name whole blocks of the first {most} tokens"
        )


def _checked_ttl(ttl_s: float) -> float:
    if not 0 < ttl_s <= MAX_TTL_S:  # also false for NaN
        raise InvalidArgumentError(f"ttl_s = {ttl_s} is out of range: use more than 0, at most {MAX_TTL_S:g} seconds")
    return ttl_s


def _wait_s(context: Context) -> float:
    remaining_s = context.time_remaining()
    if remaining_s is None:
        return math.inf
    return remaining_s - min(MAX_REPLY_S, remaining_s / 4)
