"""Transfer of cached KV blocks as messages. The sender divides a block into pieces with checksums, and the receiver
assembles the pieces.

Pieces have the same format as in a push of KV (`baton.transport.kv_frame`), but without a lease. They are sent in
ascending order. A piece contains some tokens of one layer if the layer is large, or several whole layers if they are
small. `baton.transport.block_exchange` uses this module on both sides. All functions are pure except `read_blocks`,
which runs on the asyncio loop.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass, field

import grpc
import xxhash

from baton.errors import ByteCountError, ChecksumError, LayoutMismatchError, RangeError, TransferError, UnavailableError
from baton.proto_types import range_from_proto, range_to_proto
from baton.transport.block_store import BlockPiece, OpenBlock
from baton.transport.kv_frame import Piece, decode_piece, encode_piece
from baton.transport.kv_routes import MAX_PIECE_BYTES
from baton.transport.status_interceptor import translate_rpc_errors
from baton.types import KvLayout, TokenRange
from baton.v1 import exchange_pb2, kv_pb2

SERVICE = "baton.v1.BlockExchange"


@dataclass(frozen=True)
class BlockRun:
    """Consecutive blocks of one prompt, identified by their names."""

    names: tuple[str, ...]
    block_tokens: int
    first_token: int
    """Position in the prompt of the first block's first token."""

    def parts(self) -> Iterator[tuple[str, TokenRange]]:
        """Yield the name and the token range of each block, in order."""
        for index, name in enumerate(self.names):
            start = self.first_token + index * self.block_tokens
            yield name, TokenRange(start, start + self.block_tokens)


def frames_of(block: OpenBlock, layout: KvLayout, tokens: TokenRange) -> Iterator[bytes]:
    """Yield the pieces of a block as encoded messages, in the order that BlockAssembly requires. Each piece is copied
    once. A piece has at most MAX_PIECE_BYTES bytes, unless the KV of one token in one layer is larger."""
    num_rows = max(MAX_PIECE_BYTES // layout.row_bytes, 1)
    num_layers = max(num_rows // len(tokens), 1)
    for first in range(0, layout.num_layers, num_layers):
        layers = range(first, min(first + num_layers, layout.num_layers))
        for part in tokens.split(num_rows):
            payload = [block.export(layer, part).cast("B") for layer in layers]
            checksum = xxhash.xxh3_64()
            for rows in payload:
                checksum.update(rows)
            header = kv_pb2.KvPieceHeader(
                layout_fingerprint=layout.fingerprint,
                layer=first,
                tokens=range_to_proto(part),
                checksum=checksum.intdigest(),
            )
            yield encode_piece(header, *payload)


@dataclass
class BlockAssembly:
    """Block that is being received. Its pieces must be added in order."""

    name: str
    tokens: TokenRange
    layout: KvLayout
    pieces: list[BlockPiece] = field(default_factory=list)
    """Pieces that were received so far, in the order of layers. They are views of the received messages."""
    _layer: int = 0
    _start: int = field(init=False)

    def __post_init__(self) -> None:
        self._start = self.tokens.start

    @property
    def is_complete(self) -> bool:
        """Return True if all pieces of the block have been added."""
        return self._layer == self.layout.num_layers

    def add(self, header: kv_pb2.KvPieceHeader, payload: memoryview) -> None:
        """Add the next piece of the block. Raises LayoutMismatchError if the piece's KV layout differs from the
        block's, RangeError if the piece is not the expected next one, ByteCountError for a payload of the wrong length,
        and ChecksumError for a damaged payload."""
        where = f"block {self.name}, layer {header.layer}"
        if header.layout_fingerprint != self.layout.fingerprint:
            raise LayoutMismatchError(
                f"{where}: its KV layout is {header.layout_fingerprint[:32]!r}, this store's is "
                f"{self.layout.fingerprint!r}: run the same model and dtype on both sides"
            )
        part = range_from_proto(header.tokens)
        if (header.layer, part.start) != (self._layer, self._start) or not self._start < part.end <= self.tokens.end:
            raise RangeError(
                f"{where}: tokens [{part.start}, {part.end}) came where layer {self._layer} from token {self._start} "
                "is due: send a block's pieces in order"
            )
        expected = len(part) * self.layout.row_bytes
        num_layers, rest = divmod(payload.nbytes, expected)
        most = self.layout.num_layers - self._layer if part == self.tokens else 1
        if rest or not 1 <= num_layers <= most:
            raise ByteCountError(
                f"{where}: {payload.nbytes} bytes instead of {expected} for each of 1 to {most} layers: "
                "fetch the block again"
            )
        if xxhash.xxh3_64_intdigest(payload) != header.checksum:
            raise ChecksumError(f"{where}: the payload was damaged on its way: fetch the block again")
        for index in range(num_layers):
            self.pieces.append((self._layer + index, part, payload[index * expected : (index + 1) * expected]))
        self._start = part.end
        if part.end == self.tokens.end:
            self._layer, self._start = self._layer + num_layers, self.tokens.start


async def read_blocks(
    channel: grpc.aio.Channel, layout: KvLayout, run: BlockRun
) -> AsyncGenerator[BlockAssembly, None]:
    """Read consecutive blocks from the worker at the other end of the channel. Yield each block when it is complete.

    One block is kept in memory at a time, in addition to messages that gRPC's flow control admits. Close the iterator
    to end the call. Raises the errors of `BlockAssembly.add`, StalePrefixError if the worker does not have the next
    block, and UnavailableError if the worker cannot be reached.
    """
    read: grpc.aio.UnaryStreamMultiCallable[exchange_pb2.ReadBlocksRequest, Piece] = channel.unary_stream(
        f"/{SERVICE}/Read", exchange_pb2.ReadBlocksRequest.SerializeToString, decode_piece
    )
    request = exchange_pb2.ReadBlocksRequest(**vars(run), layout_fingerprint=layout.fingerprint)
    call = read(request)
    try:
        for name, tokens in run.parts():
            block = BlockAssembly(name, tokens, layout)
            while not block.is_complete:
                block.add(*await _next_piece(call, name))
            yield block
    finally:
        call.cancel()


async def _next_piece(call: "grpc.aio.UnaryStreamCall[exchange_pb2.ReadBlocksRequest, Piece]", name: str) -> Piece:
    try:
        with translate_rpc_errors():
            piece = await call.read()
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise UnavailableError(f"block {name}: its sender cancelled the call") from error  # grpc.aio's report of it
    if not isinstance(piece, tuple):  # the end of the stream
        raise TransferError(f"block {name}: its sender ended the stream before it: fetch the block again")
    return piece
