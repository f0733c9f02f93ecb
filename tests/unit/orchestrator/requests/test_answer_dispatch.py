"""Prompts that continue an answer, through real ranks and groups: blocks of the group's node are neither computed nor
pushed, and the tokens are those of a cold start."""

import asyncio
import random
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from baton.modeling.prefix_store.node import DiskPlace
from baton.modeling.prefix_store.store import PrefixStore
from baton.planning.cost_model import CostModel, LinkModel
from baton.sampling_params import SamplingParams
from baton.types import RequestId, TokenRange
from baton.v1 import generate_pb2
from orchestrator import scheduler
from orchestrator.requests.config import OrchestratorConfig
from orchestrator.requests.request import Request
from orchestrator.requests.tenants import Tenant
from tests.support.clusters.clients import Answer
from tests.support.clusters.cluster import BareCluster, cluster
from tests.support.clusters.deadlines import Deadlines
from tests.support.clusters.planners import planner_of
from tests.support.clusters.turns import ask_turn, generate
from tests.support.engines.generation import prompt, reference_ids
from tests.support.engines.prefixes import blocks_in, file_bytes, sealed_blocks_in
from tests.support.engines.slot_tables import is_empty
from tests.support.eventually import eventually
from tests.support.models.tiny_models import random_decoder

pytestmark = pytest.mark.integration

BLOCK = 16
CHAIN = OrchestratorConfig(block_tokens=BLOCK, report_wait_s=60, disaggregation="always")
LOCAL = replace(CHAIN, disaggregation="never")
PARAMS = SamplingParams(max_tokens=40, ignore_eos=True)
SHORT = SamplingParams(max_tokens=3, ignore_eos=True)
FIRST = prompt(50)
BLOCK_BYTES = file_bytes(random_decoder().layout, BLOCK)
SLOW_LINKS = CostModel(10, linear_s=1e-4, pair_s=0.0, kv_bytes=100, link=LinkModel(0.0, 1.0))
"""By which no node fetches from another."""
with_and_without_ranks = pytest.mark.parametrize("num_ranks", [0, 2])


@asynccontextmanager
async def keeping(
    folder: Path,
    *,
    num_ranks: int = 2,
    num_blocks: int = 1000,
    isolates: bool = False,
    folders: Mapping[str, Path | None] = MappingProxyType({}),
    **options: Any,
) -> AsyncIterator[BareCluster]:
    """A cluster whose workers keep blocks in `folder`, if `folders` does not name another one for their role. Each
    folder has room for `num_blocks`. Without ranks, the generation group prefills."""
    async with cluster(
        num_ranks=num_ranks,
        config=replace(CHAIN if num_ranks else LOCAL, prefix_isolation=isolates),
        prefix_bytes=num_blocks * BLOCK_BYTES,
        folders={"prefill": folder, "generate": folder, **folders},
        **options,
    ) as made:
        yield made


def store_of(made: BareCluster) -> PrefixStore:
    """Return the store of the first generation group."""
    store = made.groups[0].prefixes
    assert store is not None
    return store


async def test_what_was_read_and_stored_is_counted(folder: Path) -> None:
    async with keeping(folder) as made:
        first = await ask_turn(made, FIRST, PARAMS)
        await ask_turn(made, first.then(20, seed=1), SHORT)
        token_bytes = made.decoder.layout.token_bytes

        async def counted() -> dict[str, float]:
            samples = await made.metrics()
            names = {"read": '{group="group-0",tier="memory"}', "stored": '{group="group-0"}'}
            return {name: samples.get(f"baton_prefix_{name}_bytes_total{labels}", 0) for name, labels in names.items()}

        seen = await eventually(counted, lambda counts: counts["read"] == 80 * token_bytes)
        assert 2 * BLOCK * token_bytes <= seen["stored"] <= 7 * BLOCK * token_bytes  # a rank stores the others


@pytest.mark.parametrize("num_ranks", [1, 3])
async def test_the_next_turn_computes_and_pushes_only_what_is_new(folder: Path, num_ranks: int) -> None:
    async with keeping(folder, num_ranks=num_ranks) as made:
        first = await ask_turn(made, FIRST, PARAMS)
        assert (first.num_cached, first.num_pushed) == (0, 50)
        second = await ask_turn(made, first.then(20, seed=1), PARAMS)
        assert (second.num_cached, second.num_pushed) == (80, 30)  # 89 of 90 tokens had KV: five whole blocks
        third = await ask_turn(made, second.then(5, seed=2), PARAMS)
        assert (third.num_cached, third.num_pushed) == (144, 11)


async def test_blocks_of_the_group_s_node_are_not_pushed_even_if_the_ranks_compute_them(
    folder: Path, other_folder: Path
) -> None:
    async with keeping(folder, folders={"generate": other_folder}, num_ranks=3, planner=planner_of(SLOW_LINKS)) as made:
        first = await ask_turn(made, FIRST, PARAMS)
        second = await ask_turn(made, first.then(20, seed=1), PARAMS)
        assert (second.num_cached, second.num_pushed) == (48, 30)
        assert len(blocks_in(other_folder)) == 9
        again = await ask_turn(made, second.prompt_ids, PARAMS)
        assert (again.num_cached, again.num_pushed) == (96, 14)


async def test_blocks_that_only_the_ranks_have_are_pushed(folder: Path, other_folder: Path) -> None:
    async with keeping(folder, folders={"generate": other_folder}) as made:
        first = await ask_turn(made, FIRST, SHORT)
        for name in blocks_in(other_folder):
            (other_folder / name).unlink()
        again = await ask_turn(made, FIRST, SHORT)
        assert (first.num_pushed, again.num_cached, again.num_pushed) == (50, 48, 50)


async def test_a_prompt_whose_blocks_are_all_cached_pushes_nothing(folder: Path) -> None:
    ids = prompt(96, seed=4)
    async with keeping(folder) as made:
        await ask_turn(made, ids, SHORT)
        again = await ask_turn(made, ids, SHORT)
        assert (again.num_cached, again.num_pushed) == (80, 0)


async def test_a_group_that_prefills_by_itself_begins_after_its_cached_blocks(folder: Path) -> None:
    async with keeping(folder, num_ranks=0) as made:
        first = await ask_turn(made, FIRST, PARAMS)
        second = await ask_turn(made, first.then(20, seed=1), SHORT)
        assert (first.num_cached, second.num_cached) == (0, 80)
        assert is_empty(made.groups[0].engine.status().ledger)


@with_and_without_ranks
async def test_choices_share_cached_blocks(folder: Path, num_ranks: int) -> None:
    params = SamplingParams(max_tokens=20, temperature=0.9, top_p=0.95, seed=5, ignore_eos=True, n=2)
    async with keeping(folder, num_ranks=num_ranks) as made:
        cold = await made.ask(made.request(FIRST, params))
        warm = await made.ask(made.request(FIRST, params))
        assert (warm.token_ids, warm.others) == (cold.token_ids, cold.others)
        assert warm.end.usage.num_cached_tokens == 48
        for output in (cold.token_ids, cold.others[1]):
            turn = await ask_turn(made, (*FIRST, *output, 1, 2), SHORT)
            assert turn.num_cached == 64


@with_and_without_ranks
async def test_a_wrong_hint_costs_a_recompute(folder: Path, num_ranks: int) -> None:
    async with keeping(folder, num_ranks=num_ranks) as made:
        first = await ask_turn(made, FIRST, PARAMS)
        ids = first.then(20, seed=1)
        for name in blocks_in(folder):
            (folder / name).unlink()
        assert (await ask_turn(made, ids, SHORT)).num_cached == 0
        assert (await ask_turn(made, ids, SHORT)).num_cached == 96


@pytest.mark.parametrize("isolates", [True, False])
@with_and_without_ranks
async def test_isolated_tenants_share_no_answers(folder: Path, isolates: bool, num_ranks: int) -> None:
    cached: list[int] = []
    async with keeping(folder, num_ranks=num_ranks, isolates=isolates) as made:
        for tenant in ("a", "b", "a"):
            asked = Request(RequestId(f"{len(cached)}"), FIRST, PARAMS, tenant=Tenant(tenant))
            cached.append((await generate(made, asked)).usage.num_cached_tokens)
        assert cached == ([0, 0, 48] if isolates else [0, 48, 48])
        assert len(blocks_in(folder)) == (10 if isolates else 5)


async def test_a_cancelled_request_keeps_no_answer(folder: Path) -> None:
    async with keeping(folder, num_ranks=0) as made:
        made.group_gates[0].shut(num_passes=8 * made.decoder.config.num_layers)
        call = made.open(made.request(FIRST, replace(PARAMS, max_tokens=300)))
        await call.read()
        await call.read()
        call.cancel()
        await eventually(made.state, lambda state: state.num_running == 0)
        await made.settle()
        assert not blocks_in(folder)


@with_and_without_ranks
async def test_blocks_that_memory_has_no_room_for_come_back_from_disk(
    folder: Path, tmp_path: Path, num_ranks: int
) -> None:
    disk = DiskPlace(tmp_path / "blocks", 1 << 30)
    async with keeping(folder, num_ranks=num_ranks, num_blocks=6, prefix_disk=disk) as made:
        first = await ask_turn(made, FIRST, PARAMS)
        for seed in range(3):
            await ask_turn(made, prompt(50, seed=20 + seed), PARAMS)
        on_disk = await eventually(
            lambda: asyncio.to_thread(sealed_blocks_in, disk.folder), lambda names: len(names) == 20
        )
        assert len(blocks_in(folder) & on_disk) == 6
        second = await ask_turn(made, first.then(20, seed=1), PARAMS)
        assert (second.num_cached, second.num_pushed) == (80, 30 if num_ranks else 0)
        name = 'baton_prefix_read_bytes_total{group="group-0",tier="disk"}'
        num_read = 80 * made.decoder.layout.token_bytes
        await eventually(made.metrics, lambda samples: samples.get(name) == num_read)
    assert not disk.folder.exists()


@with_and_without_ranks
async def test_a_client_that_leaves_while_its_answer_is_stored_has_been_answered(folder: Path, num_ranks: int) -> None:
    """The request counts as complete, its group is busy until the answer is stored, and the blocks are known."""
    async with keeping(folder, folders={"prefill": None}, num_ranks=num_ranks) as made:
        with store_of(made).locked():  # no block gets room meanwhile
            call, got = made.open(made.request(FIRST, PARAMS)), Answer()
            await got.read(call, PARAMS.max_tokens)
            call.cancel()
            counted = await eventually(made.metrics, lambda samples: ended(samples) > 0)
            assert [name for name in counted if "cancelled" in name.lower() and counted[name]] == []
            ledger = made.groups[0].engine.status().ledger
            assert (ledger.num_active, ledger.imbalance) == (1, "")
            assert made.members.load("group-0").num_slots == 1
        await made.until_empty()
        assert len(blocks_in(folder)) == 5
        second = await ask_turn(made, (*FIRST, *got.token_ids, 1, 2), SHORT)
        assert second.num_pushed == (12 if num_ranks else 0)


async def test_a_deadline_that_passes_while_an_answer_is_stored_ends_no_request(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.dispatch.token_streams._CLOSE_S", 600.0)
    deadlines = Deadlines(monkeypatch, scheduler)
    async with keeping(folder, num_ranks=0) as made:
        with store_of(made).locked():
            call, got = made.open(made.request(FIRST, SHORT)), Answer()
            await got.read(call, SHORT.max_tokens)
            deadlines.let_pass()
            await got.drain(call)
        assert got.finishes == {0: generate_pb2.FINISH_REASON_LENGTH}


def ended(samples: Mapping[str, float]) -> float:
    """Return the number of requests that have ended."""
    return sum(value for name, value in samples.items() if name.startswith("baton_requests_total"))


async def test_the_next_orchestrator_hears_what_was_stored(folder: Path) -> None:
    async with keeping(folder, num_ranks=0) as made:
        first = await ask_turn(made, FIRST, PARAMS)
        await made.server.stop()
        async with made.serving(LOCAL):
            held = made.server.orchestrator.scheduler.attempt_runner.chooser.context.prefixes
            await ask_turn(made, prompt(8, seed=9), SHORT)  # the store is asked when a request comes
            await eventually(lambda: asyncio.sleep(0, len(held)), lambda number: number == 5)
            assert (await ask_turn(made, first.then(20, seed=1), SHORT)).num_cached == 80


async def test_blocks_that_are_written_into_a_slot_stay_while_others_need_room(folder: Path) -> None:
    async with keeping(folder, num_ranks=0, num_blocks=5) as made:
        first = await ask_turn(made, FIRST, PARAMS)
        store = store_of(made)
        opened = store.open_leading(sorted(blocks_in(folder)), BLOCK).blocks
        room = store.take(["x"], TokenRange(0, BLOCK), BLOCK)
        assert (len(opened), room.writers, room.evicted) == (5, [], [])
        assert (await ask_turn(made, first.then(20, seed=1), SHORT)).num_cached == 80


@pytest.mark.parametrize("seed", range(2))
async def test_many_turns_at_once_over_a_store_that_is_too_small(seed: int, folder: Path) -> None:
    """Two groups and the ranks write, evict and read at once: tokens are right, and the bound always holds."""
    rng = random.Random(seed)
    limit_bytes = 12 * BLOCK_BYTES

    async def chat(made: BareCluster, number: int) -> None:
        ids = prompt(rng.randrange(10, 60), seed=number % 3)
        for turn in range(3):
            params = replace(SHORT, max_tokens=rng.randrange(1, 30))
            got = await made.ask(made.request(ids, params))
            assert got.token_ids == reference_ids(made.decoder, ids, params)
            ids = (*ids, *got.token_ids, *prompt(rng.randrange(1, 20), seed=turn))

    async def watch(made: BareCluster) -> None:
        store = store_of(made)
        while True:
            with store.locked():
                assert store.holdings().num_bytes <= limit_bytes
            await asyncio.sleep(0.005)  # a period

    async with keeping(folder, num_groups=2, num_blocks=12) as made:
        watching = asyncio.create_task(watch(made))
        await asyncio.gather(*(chat(made, number) for number in range(10)))
        assert not watching.done()
        watching.cancel()
        await made.until_empty()
        assert len(blocks_in(folder)) <= 12
