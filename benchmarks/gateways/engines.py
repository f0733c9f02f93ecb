"""Generation groups that run the real service, but whose engines emit scripted tokens at a given pace without
computing.

Output token number i has the id 1000 + i, and its text is one word. All groups run in one process. Their steps
alternate on one thread. All streams of a group receive a token at the same time, as in a batch.
"""

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

from baton.planning.step_cost import LearntCosts
from baton.planning.work_cost import WorkCost
from baton.transport.channel import bind, make_server
from baton.transport.identity import ClusterSecret
from baton.transport.terms import SeenTerms
from baton.types import FinishReason, KvLayout, SampledToken, TokenEvent
from baton.v1 import generate_pb2_grpc
from benchmarks.gateways.process import Answer, usage
from generate_workers.engine.core import GenerationEngine
from generate_workers.engine.rows import EventSink, GenerationRequest, StreamId
from generate_workers.engine.status import EngineStatus
from generate_workers.residency.traits import POLICIES
from generate_workers.servicer import GenerationServicer
from generate_workers.slots.leases import KvLedger, SlotLedger

LAYOUT = KvLayout("scripted", num_layers=1, num_kv_heads=1, head_dim=1, dtype="float32")
FIRST_ID = 1000
HOST = "127.0.0.1"
_NO_COST = WorkCost(0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Groups:
    """Number of generation groups, their slots and their speed."""

    num_groups: int
    num_slots: int
    """Number of slots of each group."""
    step_s: float
    """Seconds between two tokens of a stream, if the processor is fast enough."""
    says_time: bool = False
    """If true, the text of a token is the time at which it was emitted, in nanoseconds since the Unix epoch. If false,
    it is a word."""


@dataclass
class _Row:
    request: GenerationRequest
    sink: EventSink
    index: int


class ScriptedEngine:
    """Scripted replacement of a generation engine, with the methods that the gRPC servicer calls. Every stream has one
    choice, and receives one token at each step."""

    def __init__(self, num_slots: int, *, says_time: bool = False) -> None:
        self._says_time = says_time
        self.residency = SimpleNamespace(traits=POLICIES["device"])
        self._num_slots = num_slots
        self._rows: dict[StreamId, _Row] = {}
        self._lock = threading.Lock()
        self._num_opened = 0
        self._num_steps = 0

    def submit(self, request: GenerationRequest, on_event: EventSink, _hook: object) -> StreamId:
        """Open a stream and return its id. Its tokens are emitted by later calls of `step`."""
        with self._lock:
            self._num_opened += 1
            stream_id = StreamId(self._num_opened)
            self._rows[stream_id] = _Row(request, on_event, len(request.output_ids))
        return stream_id

    def cancel(self, stream_id: StreamId) -> None:
        """End a stream with a cancelled event. Does nothing if the stream has ended."""
        with self._lock:
            row = self._rows.pop(stream_id, None)
        if row is not None:
            row.sink(TokenEvent(row.index, None, "", time.time_ns(), FinishReason.CANCELLED))

    def step(self) -> None:
        """Emit one token to each stream."""
        with self._lock:
            rows = list(self._rows.items())
            now_ns = time.time_ns()
            text = f" {now_ns}" if self._says_time else " word"
            for stream_id, row in rows:
                is_last = row.index + 1 == row.request.params.max_tokens
                finish = FinishReason.LENGTH if is_last else None
                row.sink(TokenEvent(row.index, SampledToken(FIRST_ID + row.index), text, now_ns, finish))
                row.index += 1
                if is_last:
                    del self._rows[stream_id]
        self._num_steps += 1

    def status(self) -> EngineStatus:
        """Return a status in which each running stream occupies one slot and all memory counts are 0."""
        active = min(len(self._rows), self._num_slots)
        kv = KvLedger(num_bytes=0, num_bytes_free=0, num_bytes_leased=0, num_bytes_active=0, num_bytes_quarantined=0)
        ledger = SlotLedger(self._num_slots, self._num_slots - active, 0, active, 0, 0, 0, kv)
        return EngineStatus(
            ledger, active, active, self._num_steps, 0, 0, None, LearntCosts(_NO_COST, _NO_COST, 0.0, 0)
        )


@contextlib.asynccontextmanager
async def engines(groups: Groups) -> AsyncIterator[tuple[list[int], Answer]]:
    """Main function of the process that runs the engines. Yields the list of the groups' ports, which the parent
    process receives first. Then answers every question with the resources that the process has used."""
    made = [ScriptedEngine(groups.num_slots, says_time=groups.says_time) for _ in range(groups.num_groups)]
    servers, servicers, ports, terms = [], [], [], SeenTerms(ClusterSecret.new())
    for engine in made:
        server = make_server()
        ports.append(bind(server, HOST))
        servicers.append(GenerationServicer(cast(GenerationEngine, engine), LAYOUT, terms))
        generate_pb2_grpc.add_GenerationGroupServicer_to_server(servicers[-1], server)
        await server.start()
        servers.append(server)
    closing = threading.Event()
    stepping = threading.Thread(target=_step, args=(made, groups.step_s, closing))
    stepping.start()

    async def answer(_question: Any) -> Any:
        return usage()

    try:
        yield ports, answer
    finally:
        closing.set()
        await asyncio.to_thread(stepping.join)
        await asyncio.gather(*(server.stop(0) for server in servers))
        for servicer in servicers:
            servicer.close()


def _step(made: Sequence[ScriptedEngine], step_s: float, closing: threading.Event) -> None:
    """Step each engine once every `step_s` seconds, one after the other. A late engine does not catch up by faster
    steps."""
    due_s = time.monotonic()
    while True:
        for engine in made:
            if closing.wait(max(0.0, due_s - time.monotonic())):
                return
            due_s = max(due_s, time.monotonic() - step_s) + step_s / len(made)
            engine.step()
