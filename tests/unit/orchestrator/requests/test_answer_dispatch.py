"""Prompts that go on after an answer, through real ranks and groups: what the group's node has is neither computed nor
pushed, and tokens are those of a cold start."""

import asyncio
import random
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from baton.ids import RequestId
from baton.proto_types import timings_from_proto
from baton.sampling_params import SamplingParams
from baton.types import TokenEvent, TokenRange
from modeling.prefix_store.node import DiskPlace
from orchestrator.requests.config import OrchestratorConfig
from orchestrator.requests.record import Finished
from orchestrator.requests.request import Request
from orchestrator.requests.tenants import Tenant
from planning.cost_model import CostModel, Link
from planning.planner import ChainPlanner
from tests.support.clusters.clients import Answer
from tests.support.clusters.cluster import BareCluster, cluster
from tests.support.clusters.planners import planner_of
from tests.support.engines.generation import prompt, reference_ids
from tests.support.engines.prefixes import blocks_in, file_bytes, prefix_folder
from tests.support.engines.slot_tables import is_empty
from tests.support.eventually import eventually
from tests.support.models.tiny_models import random_decoder

pytestmark = pytest.mark.integration

BLOCK = 16
CONFIG = OrchestratorConfig(block_tokens=BLOCK, report_wait_s=10, disaggregation="always")
LOCAL = replace(CONFIG, disaggregation="never")
PARAMS = SamplingParams(max_tokens=40, ignore_eos=True)
SHORT = SamplingParams(max_tokens=3, ignore_eos=True)
FIRST = prompt(50)
BLOCK_BYTES = file_bytes(random_decoder().layout, BLOCK)
SLOW_LINKS = planner_of(CostModel(10, linear_s=1e-4, pair_s=0.0, kv_bytes=100, link=Link(0.0, 1.0)))
"""By which no node fetches from another."""


@pytest.fixture
def folder() -> Iterator[Path]:
    with prefix_folder() as made:
        yield made


@pytest.fixture
def other_folder() -> Iterator[Path]:
    """Of another node."""
    with prefix_folder() as made:
        yield made


@asynccontextmanager
async def keeping(
    ranks: Path | None,
    groups: Path,
    *,
    config: OrchestratorConfig = CONFIG,
    num_ranks: int = 2,
    num_blocks: int = 1000,
    planner: ChainPlanner | None = None,
) -> AsyncIterator[BareCluster]:
    """A relay whose nodes have room for so many blocks."""
    limit_bytes = num_blocks * BLOCK_BYTES
    async with cluster(
        num_ranks=num_ranks,
        config=config,
        planner=planner,
        prefix_bytes=limit_bytes,
        folders={"prefill": ranks, "generate": groups},
    ) as made:
        yield made
        await made.until_empty()


@dataclass(frozen=True)
class Turn:
    """What one request came to."""

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    num_cached: int
    num_pushed: int
    """Tokens."""

    def then(self, num_new: int, seed: int) -> tuple[int, ...]:
        """The prompt of the next turn."""
        return (*self.prompt_ids, *self.token_ids, *prompt(num_new, seed=seed))


async def answer(made: BareCluster, prompt_ids: tuple[int, ...], params: SamplingParams = PARAMS) -> Turn:
    """Asks; checks tokens, and that one attempt was enough."""
    got = await made.ask(made.request(prompt_ids, params))
    assert got.token_ids == reference_ids(made.decoder, prompt_ids, params)
    assert got.finished is not None
    usage, timings = got.finished.usage, timings_from_proto(got.finished.timings)
    assert usage.num_attempts == 1
    num_bytes = sum(rank.num_bytes_pushed for rank in timings.prefill.ranks)
    num_pushed, rest = divmod(num_bytes, made.decoder.layout.token_bytes)
    assert not rest
    return Turn(prompt_ids, tuple(got.token_ids), usage.num_cached_tokens, num_pushed)


async def test_what_was_read_and_stored_is_counted(folder: Path) -> None:
    async with keeping(folder, folder) as made:
        first = await answer(made, FIRST)
        await answer(made, first.then(20, seed=1), SHORT)
        token_bytes = made.decoder.layout.token_bytes
        num_read = 80 * token_bytes

        async def counted() -> dict[str, float]:
            samples = await made.metrics()
            names = {"read": '{group="group-0",tier="memory"}', "stored": '{group="group-0"}'}
            return {name: samples.get(f"baton_prefix_{name}_bytes_total{labels}", 0) for name, labels in names.items()}

        seen = await eventually(counted, lambda counts: counts["read"] == num_read, within_s=5)
        assert 2 * BLOCK * token_bytes <= seen["stored"] <= 7 * BLOCK * token_bytes  # others: a rank's


@pytest.mark.parametrize("num_ranks", [1, 3])
async def test_the_next_turn_computes_and_pushes_only_what_is_new(folder: Path, num_ranks: int) -> None:
    async with keeping(folder, folder, num_ranks=num_ranks) as made:
        first = await answer(made, FIRST)
        assert (first.num_cached, first.num_pushed) == (0, 50)
        second = await answer(made, first.then(20, seed=1))
        assert (second.num_cached, second.num_pushed) == (80, 30)  # 89 of 90 tokens had KV: five whole blocks
        third = await answer(made, second.then(5, seed=2))
        assert (third.num_cached, third.num_pushed) == (144, 11)


async def test_what_the_group_s_node_has_is_not_pushed_though_the_ranks_have_to_compute_it(
    folder: Path, other_folder: Path
) -> None:
    async with keeping(folder, other_folder, num_ranks=3, planner=SLOW_LINKS) as made:
        first = await answer(made, FIRST)
        second = await answer(made, first.then(20, seed=1))
        assert (second.num_cached, second.num_pushed) == (48, 30)
        assert len(blocks_in(other_folder)) == 9
        again = await answer(made, second.prompt_ids)
        assert (again.num_cached, again.num_pushed) == (96, 14)


async def test_what_only_the_ranks_have_is_pushed(folder: Path, other_folder: Path) -> None:
    async with keeping(folder, other_folder) as made:
        first = await answer(made, FIRST, SHORT)
        for name in blocks_in(other_folder):
            (other_folder / name).unlink()
        again = await answer(made, FIRST, SHORT)
        assert (first.num_pushed, again.num_cached, again.num_pushed) == (50, 48, 50)


async def test_a_prompt_that_is_there_whole_pushes_nothing(folder: Path) -> None:
    ids = prompt(96, seed=4)
    async with keeping(folder, folder) as made:
        await answer(made, ids)
        again = await answer(made, ids)
        assert (again.num_cached, again.num_pushed) == (80, 0)


async def test_a_group_that_prefills_by_itself_begins_behind_what_its_node_has(folder: Path) -> None:
    async with keeping(None, folder, config=LOCAL, num_ranks=0) as made:
        first = await answer(made, FIRST)
        second = await answer(made, first.then(20, seed=1))
        assert (first.num_cached, second.num_cached) == (0, 80)
        assert is_empty(made.groups[0].engine.status().ledger)


async def test_choices_share_what_is_there(folder: Path) -> None:
    params = SamplingParams(max_tokens=20, temperature=0.9, top_p=0.95, seed=5, ignore_eos=True, n=2)
    for config, num_ranks in ((CONFIG, 2), (LOCAL, 0)):
        async with keeping(folder if num_ranks else None, folder, config=config, num_ranks=num_ranks) as made:
            cold = await made.ask(made.request(FIRST, params))
            warm = await made.ask(made.request(FIRST, params))
            assert (warm.token_ids, warm.others) == (cold.token_ids, cold.others)
            assert warm.finished is not None and warm.finished.usage.num_cached_tokens == 48
            for output in (cold.token_ids, cold.others[1]):
                turn = await answer(made, (*FIRST, *output, 1, 2), SHORT)
                assert turn.num_cached == 64


@pytest.mark.parametrize("num_ranks", [0, 2])
async def test_a_hint_that_is_wrong_costs_a_recompute(folder: Path, num_ranks: int) -> None:
    config = CONFIG if num_ranks else LOCAL
    async with keeping(folder if num_ranks else None, folder, config=config, num_ranks=num_ranks) as made:
        first = await answer(made, FIRST)
        ids = first.then(20, seed=1)
        for name in blocks_in(folder):
            (folder / name).unlink()
        assert (await answer(made, ids)).num_cached == 0
        assert (await answer(made, ids)).num_cached == 96


@pytest.mark.parametrize("isolated", [True, False])
@pytest.mark.parametrize("num_ranks", [0, 2])
async def test_isolated_tenants_share_no_answers(folder: Path, isolated: bool, num_ranks: int) -> None:
    config = replace(CONFIG if num_ranks else LOCAL, prefix_isolation=isolated)
    cached: list[int] = []
    async with keeping(folder if num_ranks else None, folder, config=config, num_ranks=num_ranks) as made:
        for tenant in ("a", "b", "a"):
            spec = Request(RequestId(f"{len(cached)}"), FIRST, PARAMS, tenant=Tenant(tenant))
            events = [event async for event in made.server.controller.generate(spec)]
            ids = [event.token.token_id for event in events if isinstance(event, TokenEvent) and event.token]
            assert ids == reference_ids(made.decoder, FIRST, PARAMS)
            assert isinstance(events[-1], Finished)
            cached.append(events[-1].usage.num_cached_tokens)
        assert cached == ([0, 0, 48] if isolated else [0, 48, 48])
        assert len(blocks_in(folder)) == (10 if isolated else 5)


async def test_a_request_that_leaves_keeps_no_answer(folder: Path) -> None:
    async with keeping(None, folder, config=LOCAL, num_ranks=0) as made:
        made.group_gates[0].shut(num_passes=8 * made.decoder.config.num_layers)
        call = made.open(made.request(FIRST, replace(PARAMS, max_tokens=300)))
        await call.read()
        await call.read()
        call.cancel()
        await eventually(made.state, lambda state: state.num_running == 0, within_s=10)
        made.group_gates[0].open()
        await made.until_empty()
        assert not blocks_in(folder)


@pytest.mark.parametrize("num_ranks", [0, 2])
async def test_what_memory_has_no_room_for_comes_back_from_disk(folder: Path, tmp_path: Path, num_ranks: int) -> None:
    config, disk = CONFIG if num_ranks else LOCAL, DiskPlace(tmp_path / "blocks", 1 << 30)
    async with cluster(
        num_ranks=num_ranks,
        config=config,
        prefix_bytes=6 * BLOCK_BYTES,
        folders={"prefill": folder, "generate": folder},
        prefix_disk=disk,
    ) as made:
        first = await answer(made, FIRST)
        for seed in range(3):
            await answer(made, prompt(50, seed=20 + seed))
        on_disk = await eventually(
            lambda: asyncio.to_thread(blocks_in, disk.folder), lambda names: len(names) == 20, within_s=5
        )
        assert len(blocks_in(folder) & on_disk) == 6
        second = await answer(made, first.then(20, seed=1))
        assert (second.num_cached, second.num_pushed) == (80, 30 if num_ranks else 0)
        name = 'baton_prefix_read_bytes_total{group="group-0",tier="disk"}'
        num_read = 80 * made.decoder.layout.token_bytes
        await eventually(made.metrics, lambda samples: samples.get(name) == num_read, within_s=5)
        await made.until_empty()
    assert not disk.folder.exists()


@pytest.mark.parametrize("num_ranks", [0, 2])
async def test_a_client_that_leaves_while_its_answer_is_stored_has_had_it(folder: Path, num_ranks: int) -> None:
    """The request is complete, its group counts it on, and what was stored is known."""
    config = CONFIG if num_ranks else LOCAL
    async with keeping(None, folder, config=config, num_ranks=num_ranks) as made:
        store = made.groups[0].prefixes
        assert store is not None
        with store.locked():  # nobody has room meanwhile
            call, got = made.open(made.request(FIRST, PARAMS)), Answer()
            await got.read(call, PARAMS.max_tokens)
            call.cancel()
            counted = await eventually(made.metrics, lambda samples: ended(samples) > 0, within_s=5)
            assert [name for name in counted if "cancelled" in name.lower() and counted[name]] == []
            ledger = made.groups[0].engine.status().ledger
            assert (ledger.num_active, ledger.imbalance) == (1, "")
            assert made.members.load("group-0").num_slots == 1
        await made.until_empty()
        assert len(blocks_in(folder)) == 5
        second = await answer(made, (*FIRST, *got.token_ids, 1, 2), SHORT)
        assert second.num_pushed == (12 if num_ranks else 0)


async def test_a_deadline_that_passes_while_an_answer_is_stored_is_nobody_s(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.dispatch.streaming._CLOSE_S", 20.0)
    async with keeping(None, folder, config=LOCAL, num_ranks=0) as made:
        store = made.groups[0].prefixes
        assert store is not None
        deadline_s = made.server.controller._clock.now_s() + 4.0
        with store.locked():
            spec = Request(RequestId("r"), FIRST, SHORT, deadline_s=deadline_s)
            *_, finished = [event async for event in made.server.controller.generate(spec)]
        assert isinstance(finished, Finished)
        assert (finished.error, [reason.value for reason in finished.reasons]) == (None, ["length"])


def ended(samples: Mapping[str, float]) -> float:
    """Requests that have."""
    return sum(value for name, value in samples.items() if name.startswith("baton_requests_total"))


async def test_what_was_stored_is_told_to_the_next_orchestrator(folder: Path) -> None:
    async with cluster(num_ranks=0, config=LOCAL, folders={"generate": folder}) as made:
        first = await answer(made, FIRST)
        await made.server.stop()
        async with made.serving(LOCAL):
            held = made.server.controller._dispatcher.chooser.prefixes
            await answer(made, prompt(8, seed=9), SHORT)  # the store is asked when a request comes
            await eventually(lambda: asyncio.sleep(0, len(held)), lambda number: number == 5, within_s=5)
            assert (await answer(made, first.then(20, seed=1))).num_cached == 80


async def test_blocks_that_are_written_into_a_slot_stay_while_others_need_room(folder: Path) -> None:
    async with keeping(None, folder, config=LOCAL, num_ranks=0, num_blocks=5) as made:
        first = await answer(made, FIRST)
        store = made.groups[0].prefixes
        assert store is not None
        opened = store.open_leading(sorted(blocks_in(folder)), BLOCK).blocks
        room = store.take(["x"], TokenRange(0, BLOCK), BLOCK)
        assert (len(opened), room.writers, room.evicted) == (5, [], [])
        assert (await answer(made, first.then(20, seed=1))).num_cached == 80


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
        store = made.groups[0].prefixes
        assert store is not None
        while True:
            with store.locked():
                assert store.holdings().num_bytes <= limit_bytes
            await asyncio.sleep(0.005)  # not for anybody: a period

    async with cluster(
        num_groups=2, config=CONFIG, folders={"prefill": folder, "generate": folder}, prefix_bytes=limit_bytes
    ) as made:
        watching = asyncio.create_task(watch(made))
        await asyncio.gather(*(chat(made, number) for number in range(10)))
        assert not watching.done()
        watching.cancel()
        await made.until_empty()
        assert len(blocks_in(folder)) <= 12
