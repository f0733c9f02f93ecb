"""Seeded schedules of faults on the real stack. Processes are killed and stopped, calls are slow, lost, dropped and
repeated, clients cancel in any phase, and the orchestrator ends and is restarted.

Every request ends exactly once, within its time limit, with exact tokens. Afterwards, no resource is held, and all
ledgers balance.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baton.client import AsyncClient
from baton.modeling.device.emulated import EmulatedDevice
from baton.modeling.forward.weight_sizes import weight_bytes
from baton.transport.channel import make_channel
from baton.transport.kv_client import KvClient
from baton.transport.kv_sink import ReserveSpec
from baton.types import RequestId
from baton_lab.chaos.report import Outcome, Report
from baton_lab.chaos.run import Bounds, ChaosRun
from baton_lab.chaos.schedule import Schedule, Shape
from tests.support.clusters.chaos import chaos_cluster
from tests.support.clusters.clients import CLOCK
from tests.support.clusters.cluster import MAX_TOKENS
from tests.support.clusters.supervision import TTL_S
from tests.support.engines.generation import eos_decoder
from tests.support.engines.speculating import SPECULATING
from tests.support.models.tiny_tokenizer import NUM_LETTERS
from tests.support.wire.secret import SECRET

pytestmark = pytest.mark.integration

SHAPE = Shape(
    victims=("prefill-0.0", "prefill-0.1", "generate-0", "generate-1", "orchestrator"), vocab_size=NUM_LETTERS
)
BOUNDS = Bounds(request_s=120.0, settle_s=2 * TTL_S + 28)
"""A slot whose release was lost is freed by its lease's end; a worker that was stopped is replaced."""
SEEDS = (1, 2, 33)
"""Together they kill and stop ranks, engines and the orchestrator."""
FOUND = (12,)
"""These found something. 12: a broken shared stream of a killed engine was no reason to try again."""
SOAK_SEEDS = [seed for seed in range(1, 55) if seed not in SEEDS + FOUND]
"""With 40 requests each."""


async def run(folder: Path, seed: int, way: str = "off", *, emulates: bool = False, **generate: Any) -> Report:
    """One schedule, on a cluster of its own whose engines speculate in that way. `generate`: further fields of their
    configuration."""
    schedule = Schedule.of(seed, SHAPE)
    fields = {**SPECULATING[way], **generate}
    async with chaos_cluster(folder, generate=fields, emulates=emulates) as (cluster, reference):
        assert cluster.victims == SHAPE.victims
        report = await ChaosRun(cluster, schedule, CLOCK, bounds=BOUNDS).run(reference)
        async with AsyncClient(cluster.endpoint) as client:
            groups = (await client.cluster_state()).groups
        engines = [group.generation for group in groups if group.generation is not None]
        assert {each.HasField("speculation") for each in engines} == {way != "off"}
        return report


def check(report: Report) -> None:
    print(report.schedule)
    assert not report.complaints, str(report)
    assert report.outcomes[Outcome.ANSWERED] >= len(report.answers) / 2
    assert any(hit for _, hit in report.blows), "nobody was struck"
    assert report.num_by_chains and report.num_cached_tokens, "no chain, or no prefix, was used"


@pytest.mark.parametrize("seed", [SEEDS[0], *(pytest.param(seed, marks=pytest.mark.ci) for seed in SEEDS[1:] + FOUND)])
async def test_a_schedule_leaves_exact_streams_and_nothing_held(tmp_path: Path, seed: int) -> None:
    check(await run(tmp_path, seed))


@pytest.mark.ci
@pytest.mark.parametrize(("seed", "way"), [(3, "auto"), (4, "streaming"), (5, "streaming host"), (6, "ngram")])
async def test_a_schedule_does_so_where_engines_speculate(tmp_path: Path, seed: int, way: str) -> None:
    check(await run(tmp_path, seed, way))


@pytest.mark.ci
@pytest.mark.parametrize(
    ("seed", "way", "residency"), [(1, "off", "device"), (2, "off", "host"), (33, "streaming", "device")]
)
async def test_a_schedule_does_so_on_emulated_devices(tmp_path: Path, seed: int, way: str, residency: str) -> None:
    check(await run(tmp_path, seed, way, emulates=True, residency=residency))


@pytest.mark.ci
@pytest.mark.parametrize("residency", ["device", "host"])
async def test_a_schedule_does_so_where_a_device_has_room_for_few_rows(tmp_path: Path, residency: str) -> None:
    """Rows wait for memory, and give way to one another, while workers die."""
    decoder = eos_decoder()
    memory = EmulatedDevice().row_memory(decoder.layout, MAX_TOKENS)
    room = 3 * memory.bytes_for(MAX_TOKENS) + weight_bytes(decoder.weights)
    fields: dict[str, Any] = {"residency": residency, "device_memory_bytes": room, "growth_tokens": 16}
    check(await run(tmp_path, 1, emulates=True, **fields))


async def test_what_does_not_hold_is_said(tmp_path: Path) -> None:
    """Nothing happens but that somebody takes a slot and does not give it back, and that no token is right."""
    schedule = Schedule.of(1, replace(SHAPE, num_asks=2, num_blows=0)).calm
    async with chaos_cluster(tmp_path, num_groups=1) as (cluster, reference):
        async with AsyncClient(cluster.endpoint) as client:
            (engine,) = (group for group in (await client.cluster_state()).groups if group.role == "generate")
        async with make_channel(engine.endpoints[0], secret=SECRET) as channel:
            kv = KvClient(channel)
            spec = ReserveSpec(RequestId("lost"), 1, 4, 8, ttl_s=600.0)
            lease = await kv.reserve(spec, reference.decoder.layout.fingerprint)
            run = ChaosRun(cluster, schedule, CLOCK, bounds=replace(BOUNDS, settle_s=5.0))
            report = await run.run(lambda ask, choice, tokens: f"{len(tokens)} wrong tokens")
            await kv.abort(lease.ref)
    held, *wrong = report.complaints
    assert held.startswith("still held after 5 s: 1 slots of generate-0")
    choices = [(ask.number, choice) for ask in schedule.asks for choice in range(ask.params.n)]
    assert len(wrong) == len(choices) and all(each.endswith("wrong tokens") for each in wrong)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", SOAK_SEEDS)
async def test_two_thousand_requests(tmp_path: Path, seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    report = await run(tmp_path, seed)
    with capsys.disabled():
        print(f"\n{report}", end=" ")
    check(report)
