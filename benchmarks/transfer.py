"""How fast does KV travel into a slot? Our push against the same bytes in plain protobuf messages (`plain`).

Both go over loopback gRPC into a receiver process of its own. Ours is checked (stamp, layout, byte count, checksum) and
written in place; the baseline is parsed as `KvPiece` by protobuf, unchecked, and written one piece behind the other.
Both write into new memory, as a leased slot's is. Pieces are 1 MiB at most.
"""

import argparse
import asyncio
import multiprocessing
import sys
import time
from collections.abc import AsyncIterator
from multiprocessing.connection import Connection

import grpc
import numpy as np
import torch

from baton.clock import SystemClock
from baton.ids import RequestId
from baton.types import KvLayout, TokenRange
from baton.v1 import kv_pb2
from benchmarks.support.harness import PAIRS, QUICK_PAIRS, Pairs, Reporter, case, make_parser
from generate_workers.residency.policies import make_residency
from generate_workers.residency.port import KvShape
from generate_workers.slots.memory import KvMemory, MemoryLimits
from generate_workers.slots.table import SlotTable
from modeling.device.cpu import CpuDevice
from modeling.kv.buffers import KvBuffer
from transport.channel import bind, make_channel, make_server
from transport.kv_client import KvClient
from transport.kv_receiver import KvReceiverServicer
from transport.kv_sender import open_push
from transport.kv_sink import ReserveSpec

LENGTHS = "64,512,2048,6000"
QUICK_LENGTHS = "512"
LAYOUT = KvLayout("benchmark", num_layers=30, num_kv_heads=3, head_dim=64, dtype="bfloat16")
"""KV layout of the standard model, smollm2-135m."""
MAX_TOKENS = 8192
_PLAIN = "/baton.benchmark.Plain/Push"


class _PlainHandler(grpc.GenericRpcHandler):
    """The baseline's receiver, in which protobuf does all the work."""

    def service(
        self, details: grpc.HandlerCallDetails
    ) -> "grpc.RpcMethodHandler[kv_pb2.KvPiece, kv_pb2.PushReply] | None":
        if details.method != _PLAIN:
            return None
        return grpc.stream_unary_rpc_method_handler(
            _drain, kv_pb2.KvPiece.FromString, kv_pb2.PushReply.SerializeToString
        )


async def _drain(pieces: AsyncIterator[kv_pb2.KvPiece], context: object) -> kv_pb2.PushReply:
    memory = np.empty(MAX_TOKENS * LAYOUT.token_bytes, dtype=np.uint8)
    num_bytes = 0
    async for piece in pieces:
        payload = np.frombuffer(piece.payload, dtype=np.uint8)
        memory[num_bytes : num_bytes + payload.size] = payload
        num_bytes += payload.size
    return kv_pb2.PushReply(num_bytes=num_bytes)


def _receive(pipe: Connection) -> None:
    """Run the receiver's process: serve until told to exit."""

    async def serve() -> None:
        server = make_server()
        port = bind(server, "127.0.0.1", 0)
        shape = KvShape(LAYOUT, (None,) * LAYOUT.num_layers, num_slots=1, max_slot_tokens=MAX_TOKENS)
        residency = make_residency("device", shape, CpuDevice())
        memory = KvMemory(residency, shape, MemoryLimits(MAX_TOKENS * LAYOUT.token_bytes), growth_tokens=1)
        slots = SlotTable(memory, SystemClock(), endpoint=f"127.0.0.1:{port}")
        KvReceiverServicer(slots).add_to(server)
        server.add_generic_rpc_handlers((_PlainHandler(),))
        await server.start()
        pipe.send(port)
        await asyncio.to_thread(pipe.recv)
        await server.stop(0)

    asyncio.run(serve())


async def _push(channel: grpc.aio.Channel, buffer: KvBuffer) -> float:
    """Return the GB/s of one prompt's KV, pushed layer by layer into a new lease."""
    tokens = buffer.tokens
    spec = ReserveSpec(RequestId("benchmark"), 1, len(tokens), len(tokens), ttl_s=60.0)
    leases = KvClient(channel)
    lease = await leases.reserve(spec, LAYOUT.fingerprint)
    start = time.perf_counter()
    session = open_push(channel, LAYOUT, lease)
    for layer in range(LAYOUT.num_layers):
        session.offer(layer, tokens, buffer.export(layer, tokens))
    session.finish()
    summary = await session.result()
    elapsed_s = time.perf_counter() - start
    await leases.abort(lease.ref)
    return summary.num_bytes / elapsed_s / 1e9


async def _push_plain(channel: grpc.aio.Channel, buffer: KvBuffer) -> float:
    """Return the GB/s of the same pieces as plain messages."""
    call = channel.stream_unary(_PLAIN, kv_pb2.KvPiece.SerializeToString, kv_pb2.PushReply.FromString)
    max_tokens = 2**20 // LAYOUT.row_bytes

    async def pieces() -> AsyncIterator[kv_pb2.KvPiece]:
        for layer in range(LAYOUT.num_layers):
            for part in buffer.tokens.split(max_tokens):
                yield kv_pb2.KvPiece(payload=bytes(buffer.export(layer, part)))

    start = time.perf_counter()
    reply = await call(pieces())
    return int(reply.num_bytes) / (time.perf_counter() - start) / 1e9


async def _measure(args: argparse.Namespace, port: int) -> None:
    pairs = QUICK_PAIRS if args.quick else PAIRS
    reporter = Reporter("transfer", args.json)
    channel, plain = make_channel(f"127.0.0.1:{port}"), make_channel(f"127.0.0.1:{port}")
    for num_tokens in (int(n) for n in (args.tokens or (QUICK_LENGTHS if args.quick else LENGTHS)).split(",")):
        buffer = KvBuffer(LAYOUT, TokenRange(0, num_tokens))
        buffer.data.normal_()
        sides: tuple[list[float], list[float]] = ([], [])
        for _ in range(pairs + 1):
            sides[0].append(await _push(channel, buffer))
            sides[1].append(await _push_plain(plain, buffer))
        reporter.add(case(tokens=num_tokens), "gb_s", "GB/s", "plain", Pairs(sides[0][1:], sides[1][1:]))
    reporter.close()
    await channel.close()
    await plain.close()


def main() -> int:
    """Run the benchmark; return the exit status."""
    parser = make_parser(__doc__)
    parser.add_argument("--tokens", default=None, help=f"prompt lengths (default {LENGTHS})")
    args = parser.parse_args()
    torch.set_num_threads(1)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    receiver = context.Process(target=_receive, args=(theirs,), daemon=True)
    receiver.start()
    try:
        asyncio.run(_measure(args, ours.recv()))
    finally:
        ours.send(None)
        receiver.join(5)
    return 0


if __name__ == "__main__":
    sys.exit(main())
