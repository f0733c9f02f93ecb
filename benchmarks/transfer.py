"""Benchmark of the transfer of KV into a slot: measures its speed and its processor time.

Three schemes are compared. Each sends from this process to a receiver process on the same node. They are measured
alternately:

    shared   Baton's push through shared memory
    stream   Baton's push over loopback gRPC
    plain    the same bytes in plain protobuf messages, over loopback gRPC

In Baton's pushes, the receiver checks the lease's stamp, the layout, the byte count and the checksum, and writes the
data in place. In the baseline `plain`, protobuf parses `KvPiece` messages. The receiver does not check the messages,
and writes their data piece by piece. All schemes write to new memory, as for a leased slot. Both processes rarely
collect garbage, as workers do.

Output rows, by `scheme`: gb_s, GB per second; gb_cpu_s, GB per second of processor time of both processes together. If
`--bars` is given, the benchmark fails if, for a prompt of 512 tokens or more, gb_cpu_s of `shared` is less than twice
that of `stream` (docs/gaps.md, "KV of short prompts through shared memory").
"""

import argparse
import asyncio
import multiprocessing
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection

import grpc
import numpy as np
import torch

from baton.modeling.device.cpu import CpuDevice
from baton.modeling.kv.buffers import KvBuffer
from baton.process.clock import SystemClock
from baton.process.garbage import collect_rarely
from baton.transport.channel import bind, make_channel, make_server
from baton.transport.kv_client import KvClient
from baton.transport.kv_receiver import KvReceiverServicer
from baton.transport.kv_routes import MAX_PIECE_BYTES, make_pool
from baton.transport.kv_sender import open_push
from baton.transport.kv_sink import ReserveSpec
from baton.transport.shared_memory import CellPool
from baton.types import KvLayout, RequestId, TokenRange
from baton.v1 import kv_pb2
from benchmarks.support.harness import PAIRS, QUICK_PAIRS, Bars, Pairs, Reporter, case, make_parser
from generate_workers.residency.policies import make_residency
from generate_workers.residency.port import KvShape
from generate_workers.slots.kv_memory import KvMemory, MemoryLimits
from generate_workers.slots.table import SlotTable

LENGTHS = "64,512,2048,6000"
QUICK_LENGTHS = "512"
LAYOUT = KvLayout("benchmark", num_layers=30, num_kv_heads=3, head_dim=64, dtype="bfloat16")
"""KV layout of smollm2-135m, the default model."""
MAX_TOKENS = 8192
BAR = 2.0
"""Minimum ratio of the bytes per second of processor time of `shared` (shared memory) to those of `stream` (gRPC)."""
BAR_FROM_TOKENS = 512
"""Number of tokens of the shortest prompt for which the limit `BAR` is checked. For shorter prompts, the cost of calls
exceeds that of copying bytes."""
_LEAST_BYTES = 64 * 10**6
"""Minimum number of bytes that one measurement transfers. It is large enough that work other than the transfer is
negligible."""
_PLAIN = "/baton.benchmark.Plain/Push"


class _PlainHandler(grpc.GenericRpcHandler):
    """Receiver of the baseline `plain`, in which protobuf parses and serializes all messages."""

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
    """Run the receiver's process: answer each question with its processor time, until a false message ends it."""

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
        collect_rarely()
        pipe.send(port)
        while await asyncio.to_thread(pipe.recv):
            pipe.send(time.process_time())
        await server.stop(0)

    asyncio.run(serve())


Push = Callable[[], Awaitable[None]]
"""Function that pushes the KV of one prompt."""


def _pusher(channel: grpc.aio.Channel, buffer: KvBuffer, pool: CellPool | None) -> Push:
    """Return a function that pushes the buffer layer by layer into a new lease: through shared memory if there is a
    pool, else over gRPC."""
    tokens = buffer.tokens
    spec = ReserveSpec(RequestId("benchmark"), 1, len(tokens), len(tokens), ttl_s=60.0)
    leases = KvClient(channel)

    async def push() -> None:
        lease = await leases.reserve(spec, LAYOUT.fingerprint)
        session = open_push(channel, LAYOUT, lease, pool=pool)
        for layer in range(LAYOUT.num_layers):
            session.offer(layer, tokens, buffer.export(layer, tokens))
        session.finish()
        summary = await session.result()
        assert summary.num_bytes_shared == (0 if pool is None else summary.num_bytes), "the other route was used"
        await leases.abort(lease.ref)

    return push


def _plain_pusher(channel: grpc.aio.Channel, buffer: KvBuffer) -> Push:
    """Return the baseline's function, which sends the buffer in plain messages."""
    call = channel.stream_unary(_PLAIN, kv_pb2.KvPiece.SerializeToString, kv_pb2.PushReply.FromString)
    max_tokens = MAX_PIECE_BYTES // LAYOUT.row_bytes

    async def pieces() -> AsyncIterator[kv_pb2.KvPiece]:
        for layer in range(LAYOUT.num_layers):
            for part in buffer.tokens.split(max_tokens):
                yield kv_pb2.KvPiece(payload=bytes(buffer.export(layer, part)))

    async def push() -> None:
        await call(pieces())

    return push


@dataclass(frozen=True)
class Rates:
    """Transfer rates of one scheme (shared, stream or plain) in one measurement: GB per second, and GB per second of
    processor time."""

    gb_s: float
    gb_cpu_s: float


async def _measure_side(push: Push, num_bytes: int, pipe: Connection) -> Rates:
    """Repeat a push until `_LEAST_BYTES` are moved, and return the rates."""
    times = max(1, round(_LEAST_BYTES / num_bytes))
    cpu_s, start_s = _cpu_s(pipe), time.perf_counter()
    for _ in range(times):
        await push()
    elapsed_s, spent_s = time.perf_counter() - start_s, _cpu_s(pipe) - cpu_s
    gb = times * num_bytes / 1e9
    return Rates(gb / elapsed_s, gb / spent_s)


def _cpu_s(pipe: Connection) -> float:
    """Return the processor time of this process and the receiver's process together, in seconds."""
    pipe.send(True)
    receivers_s: float = pipe.recv()
    return time.process_time() + receivers_s


async def _measure(args: argparse.Namespace, port: int, pipe: Connection) -> int:
    pairs = QUICK_PAIRS if args.quick else PAIRS
    reporter, bars = Reporter("transfer", args.json), Bars()
    collect_rarely()
    channels = [make_channel(f"127.0.0.1:{port}") for _ in range(3)]
    pool = make_pool(LAYOUT)
    for num_tokens in (int(n) for n in (args.tokens or (QUICK_LENGTHS if args.quick else LENGTHS)).split(",")):
        buffer = KvBuffer(LAYOUT, TokenRange(0, num_tokens))
        buffer.data.normal_()
        sides = {
            "shared": _pusher(channels[0], buffer, pool),
            "stream": _pusher(channels[1], buffer, None),
            "plain": _plain_pusher(channels[2], buffer),
        }
        found: dict[str, list[Rates]] = {name: [] for name in sides}
        for number in range(pairs + 1):
            for name, push in sides.items():
                rates = await _measure_side(push, buffer.num_bytes, pipe)
                found[name].extend([rates] if number else [])
        ratio = _report(reporter, num_tokens, found)
        if num_tokens >= BAR_FROM_TOKENS:
            bars.at_least(f"{num_tokens} tokens, shared over stream, bytes per second of processor time", ratio, BAR)
    reporter.close()
    pool.close()
    for channel in channels:
        await channel.close()
    return bars.close() if args.bars else 0


def _report(reporter: Reporter, num_tokens: int, found: dict[str, list[Rates]]) -> float:
    """Report `stream` compared with `plain` and `shared` compared with `stream`. Return the ratio of `shared`'s to
    `stream`'s bytes per second of processor time."""
    ratio = 0.0
    for name, baseline in (("stream", "plain"), ("shared", "stream")):
        keys = case(tokens=num_tokens, scheme=name)
        ours, theirs = found[name], found[baseline]
        wall = Pairs([each.gb_s for each in ours], [each.gb_s for each in theirs])
        reporter.add(keys, "gb_s", "GB/s", baseline, wall)
        cpu = Pairs([each.gb_cpu_s for each in ours], [each.gb_cpu_s for each in theirs])
        ratio = reporter.add(keys, "gb_cpu_s", "GB/s", baseline, cpu).ratio
    return ratio


def main() -> int:
    """Run the benchmark; return the exit status."""
    parser = make_parser(__doc__)
    parser.add_argument("--tokens", default=None, help=f"prompt lengths (default {LENGTHS})")
    parser.add_argument("--bars", action="store_true", help="exit with 1 when a bar is missed")
    args = parser.parse_args()
    torch.set_num_threads(1)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    receiver = context.Process(target=_receive, args=(theirs,), daemon=True)
    receiver.start()
    try:
        return asyncio.run(_measure(args, ours.recv(), ours))
    finally:
        ours.send(None)
        receiver.join(5)


if __name__ == "__main__":
    sys.exit(main())
