"""Two prefill ranks behind real servers, and a receiver of the KV that they push."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.distributed import TCPStore

from baton.modeling.forward.decoder import Decoder
from baton.modeling.hosting import PrefixPlace
from baton.modeling.prefix_store.node import DiskPlace
from baton.process.clock import Clock, SystemClock
from baton.proto_types import range_to_proto
from baton.sampling_params import SamplingParams
from baton.text.grammars import Grammars
from baton.transport.channel import make_channel
from baton.transport.proto_types import history_to_proto, lease_to_proto
from baton.transport.status_interceptor import translate_rpc_errors
from baton.types import Lease, TokenRange
from baton.v1 import prefill_pb2
from baton.v1.prefill_pb2_grpc import PrefillRankStub
from prefill_workers.config import PrefillConfig
from prefill_workers.engine import PrefillEngine
from prefill_workers.servicer import PrefillServer
from tests.support.engines.chains import largest_error, reference
from tests.support.engines.prefixes import PLENTY
from tests.support.models.tiny_models import random_decoder
from tests.support.wire.kv_loopback import Loopback, loopback
from tests.support.wire.secret import PLACE, SECRET

if TYPE_CHECKING:
    from baton.v1.prefill_pb2_grpc import PrefillRankAsyncStub

HOST = "127.0.0.1"
IDS = tuple(range(3, 33))
CHUNKS = (TokenRange(0, 13), TokenRange(13, 30))
TIMEOUT_S = 20.0


@dataclass
class Ranks:
    """Two prefill ranks behind their servers, and a receiver of KV."""

    decoder: Decoder
    servers: list[PrefillServer]
    stubs: "list[PrefillRankAsyncStub]"
    receiver: Loopback
    store: TCPStore
    epoch: int = 0
    jobs: int = field(default=0)

    async def start_epoch(self, ranks: Sequence[int] = (0, 1), timeout_s: float = TIMEOUT_S) -> None:
        self.epoch += 1
        requests = [
            prefill_pb2.StartEpochRequest(
                epoch=self.epoch, rank=rank, num_ranks=2, store=f"{HOST}:{self.store.port}", timeout_s=timeout_s
            )
            for rank in ranks
        ]
        with translate_rpc_errors():
            await asyncio.gather(*(self.stubs[request.rank].StartEpoch(request) for request in requests))

    async def lease(self) -> Lease:
        return dataclasses.replace(await self.receiver.reserve(len(IDS)), endpoint=self.receiver.endpoint)

    def check_slot(self, lease: Lease) -> None:
        """Check that the pushed KV and first token equal those computed in one forward pass."""
        expected, logits_V = reference(self.decoder, IDS)
        rows = [self.receiver.sink.read(lease.ref, layer, TokenRange(0, len(IDS))) for layer in range(3)]
        kv = torch.stack([torch.frombuffer(bytearray(row), dtype=torch.float32) for row in rows])
        assert largest_error(kv.view(expected.shape), expected) <= 1e-5
        first = self.receiver.sink.first(lease.ref)
        assert first is not None
        assert first.token_id == int(logits_V.argmax())

    def job(self, lease: Lease, *, params: SamplingParams | None = None) -> prefill_pb2.PrefillJob:
        self.jobs += 1
        return prefill_pb2.PrefillJob(
            epoch=self.epoch,
            job=self.jobs,
            request_id="r",
            attempt=1,
            ranks=[0, 1],
            chunks=[range_to_proto(chunk) for chunk in CHUNKS],
            history=history_to_proto(IDS[:25], IDS[25:], params or SamplingParams()),
            lease=lease_to_proto(lease),
        )

    async def run(self, rank: int, job: prefill_pb2.PrefillJob) -> prefill_pb2.PrefillReport:
        with translate_rpc_errors():
            return await self.stubs[rank].Run(job, timeout=TIMEOUT_S)

    async def status(self, rank: int) -> prefill_pb2.PrefillStatus:
        return await self.stubs[rank].GetStatus(prefill_pb2.PrefillStatusRequest(), timeout=TIMEOUT_S)


@asynccontextmanager
async def two_ranks(
    prefix_folder: Path | None = None,
    prefix_disk: DiskPlace | None = None,
    *,
    may_share: bool = True,
    watchdog_floor_s: float = TIMEOUT_S,
    clock: Clock | None = None,
    decoder: Decoder | None = None,
    grammars: Sequence[Grammars | None] = (None, None),
) -> AsyncIterator[Ranks]:
    torch.set_num_threads(1)
    decoder, config = decoder or random_decoder(num_layers=3), PrefillConfig(watchdog_floor_s=watchdog_floor_s)
    prefixes = None if prefix_folder is None else PrefixPlace(prefix_folder, PLENTY, prefix_disk)
    async with AsyncExitStack() as stack:
        receiver = await stack.enter_async_context(loopback(layout=decoder.layout))
        servers = [
            await PrefillServer.start(
                PrefillEngine(decoder, clock or SystemClock(), config),
                PLACE,
                prefixes=prefixes,
                may_share=may_share,
                grammars=each,
            )
            for each in grammars
        ]
        channels = [
            await stack.enter_async_context(make_channel(f"{HOST}:{server.port}", secret=SECRET)) for server in servers
        ]
        store = await asyncio.to_thread(TCPStore, HOST, 0, None, True, wait_for_workers=False)
        try:
            yield Ranks(decoder, servers, [PrefillRankStub(channel) for channel in channels], receiver, store)
        finally:
            await asyncio.gather(*(server.stop() for server in servers))
