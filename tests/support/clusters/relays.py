"""Clusters of `baton local`: start one, send requests to its orchestrator, and inspect what its workers hold."""

import contextlib
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from baton.errors import BatonError
from baton.process.clock import SystemClock
from baton.results.timings import Timings
from baton.sampling_params import SamplingParams
from baton.types import RequestId, TokenEvent
from baton.v1 import generate_pb2, prefill_pb2
from deploy.commands.session import running_scheduler
from deploy.config.file import WrittenConfig
from deploy.groups.cluster import LocalCluster
from deploy.machine.cluster_plan import ClusterPlan
from deploy.machine.resolved_model import ResolvedModel
from orchestrator.requests.record import Finished
from orchestrator.requests.request import Request
from orchestrator.scheduler import RequestScheduler

CLOCK = SystemClock()


@dataclass(frozen=True)
class Answer:
    """All events of one request's stream."""

    tokens: list[TokenEvent]
    finished: Finished

    @property
    def token_ids(self) -> list[int]:
        return [event.token.token_id for event in self.tokens if event.token is not None]

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.tokens)

    @property
    def timings(self) -> Timings:
        return self.finished.timings

    @property
    def num_attempts(self) -> int:
        return self.finished.usage.num_attempts


@dataclass(frozen=True)
class Relay:
    """A running local cluster and its orchestrator."""

    cluster: LocalCluster
    scheduler: RequestScheduler


@contextlib.asynccontextmanager
async def local_relay(
    folder: Path,
    *,
    num_ranks: int,
    prefix_share: float = 0.0,
    heartbeat_s: float = 1.0,
    transfer: str = "auto",
    generate: Mapping[str, Any] = MappingProxyType({}),
    device: str = "cpu",
) -> AsyncIterator[Relay]:
    """Run a local cluster, and end all its processes at the end. By default, it stores no prefixes, because tests
    repeat requests and count the tokens that are computed. `generate` sets further fields of the generation group.
    `device` is the device of all workers."""
    prefill = {
        "num_ranks": num_ranks,
        "watchdog_floor_s": 5.0,
        "prefix_share": prefix_share,
        "transfer": transfer,
        "device": device,
    }
    config = WrittenConfig(
        {
            "model": {"dtype": "float32"},
            "prefill": prefill if num_ranks else {"num_groups": 0},
            "generate": {"num_threads": 1, "device": device, **generate},
            "supervision": {"heartbeat_s": heartbeat_s},
        }
    ).local.config
    async with (
        LocalCluster(ClusterPlan(config, ResolvedModel(folder)), CLOCK) as cluster,
        running_scheduler(cluster, CLOCK) as scheduler,
    ):
        yield Relay(cluster, scheduler)


async def ask(
    relay: Relay,
    prompt_ids: tuple[int, ...],
    params: SamplingParams,
    on_token: Callable[[int], None] = lambda num: None,
) -> Answer:
    """Run one request to its end. `on_token` is called with the number of tokens received so far. Raises the request's
    error."""
    tokens: list[TokenEvent] = []
    request = Request(RequestId(uuid.uuid4().hex), prompt_ids, params)
    async with contextlib.aclosing(relay.scheduler.generate(request)) as events:
        async for event in events:
            if isinstance(event, TokenEvent):
                tokens.append(event)
                on_token(len(tokens))
            elif isinstance(event, Finished):
                if event.error is not None:
                    raise event.error
                return Answer(tokens, event)
    raise BatonError("a stream ended without its last event")


async def generation_status(relay: Relay) -> generate_pb2.GenerationStatus:
    """Return the status that the generation engine reports."""
    return await relay.cluster.engine.generation.GetStatus(generate_pb2.GenerationStatusRequest())


async def slots_in_use(relay: Relay) -> tuple[int, int]:
    """Return (number of used slots, number of KV bytes held) of the generation engine."""
    status = await generation_status(relay)
    return status.num_slots - status.num_free, status.num_bytes_held


async def check_drafted(relay: Relay, way: str) -> None:
    """Check that the generation engine has drafted tokens. `way` is its name in SPECULATING. With `auto`, it may have
    drafted none, because it may find that drafts do not pay off."""
    status = await generation_status(relay)
    assert status.HasField("speculation") == (way != "off")
    assert status.speculation.num_drafted or way in ("off", "auto", "auto host"), status.speculation


async def jobs_in_flight(relay: Relay) -> list[int]:
    """Return the number of jobs that each prefill rank holds."""
    request = prefill_pb2.PrefillStatusRequest()
    return [(await worker.prefill.GetStatus(request)).num_jobs for worker in relay.cluster.ranks]
