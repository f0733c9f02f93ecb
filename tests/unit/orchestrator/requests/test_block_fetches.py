"""Chats whose turns run on different nodes: what another node has cached is fetched from there when that is predicted
to be faster than computing it, and nothing that goes wrong with it costs more than the attempt's time.

A folder in memory stands for a node: its store's identity tells it from others.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from baton.planning.cost_model import CostModel, LinkModel
from baton.planning.local_prefill import LocalPrefill
from baton.planning.planner import ChainPlanner
from baton.sampling_params import SamplingParams
from baton.types import TokenRange
from orchestrator.requests.config import OrchestratorConfig
from tests.support.clusters.cluster import BareCluster, cluster
from tests.support.clusters.planners import planner_of
from tests.support.clusters.turns import Turn, ask_turn
from tests.support.engines.generation import prompt, reference_ids
from tests.support.engines.prefixes import blocks_in, file_bytes, prefix_folder
from tests.support.eventually import eventually
from tests.support.models.tiny_models import random_decoder

pytestmark = pytest.mark.integration

BLOCK = 16
LOCAL = OrchestratorConfig(block_tokens=BLOCK, report_wait_s=60, disaggregation="never")
CHAIN = replace(LOCAL, disaggregation="always")
PARAMS = SamplingParams(max_tokens=40, ignore_eos=True)
FIRST = prompt(50)
BLOCK_BYTES = file_bytes(random_decoder().layout, BLOCK)


def planner(bandwidth: float = 1e9) -> ChainPlanner:
    """Predicts 10 s for a token's computing, until groups turn out to be faster, by at most a factor of 32; and for its
    KV of 1,000 bytes, a link of so many bytes a second."""
    cost = CostModel(10, linear_s=1.0, pair_s=0.0, kv_bytes=100, link=LinkModel(0.0, bandwidth))
    return planner_of(cost, local=LocalPrefill(1.0, 256))


@pytest.fixture
def nodes() -> Iterator[list[Path]]:
    """Folders of three nodes: those of two generation groups, and that of the ranks."""
    with ExitStack() as held:
        yield [held.enter_context(prefix_folder()) for _ in range(3)]


@asynccontextmanager
async def three_nodes(
    nodes: Sequence[Path],
    *,
    config: OrchestratorConfig = LOCAL,
    link: float = 1e9,
    num_ranks: int = 0,
    num_blocks: int = 1000,
) -> AsyncIterator[BareCluster]:
    """A group on each of the first two nodes, and a chain on the third."""
    async with cluster(
        num_ranks=num_ranks,
        num_groups=2,
        config=config,
        planner=planner(link),
        prefix_bytes=num_blocks * BLOCK_BYTES,
        folders={"prefill": nodes[2], "generate-0": nodes[0], "generate-1": nodes[1]},
    ) as made:
        yield made


async def turn(made: BareCluster, prompt_ids: tuple[int, ...], on: int) -> Turn:
    """Ask while the other group is drained."""
    for index in range(2):
        (made.members.undrain if index == on else made.members.drain)(f"group-{index}")
    return await ask_turn(made, prompt_ids, PARAMS)


async def chat(made: BareCluster, *groups: int) -> list[Turn]:
    """Three turns, each on the given group."""
    turns = [await turn(made, FIRST, groups[0])]
    for number, group in enumerate(groups[1:]):
        turns.append(await turn(made, turns[-1].then(20 - 5 * number, seed=number), group))
    return turns


@pytest.mark.parametrize("num_ranks", [0, 2])
async def test_a_chat_over_nodes_has_what_it_has_on_one(num_ranks: int) -> None:
    config, cached = (CHAIN if num_ranks else LOCAL), {}
    for name, groups in (("one", (0, 0, 0)), ("over", (0, 1, 0))):
        with ExitStack() as held:
            own = [held.enter_context(prefix_folder()) for _ in range(3)]
            folders = own if name == "over" else [own[0], own[0], own[0]]
            async with three_nodes(folders, config=config, num_ranks=num_ranks) as made:
                turns = await chat(made, *groups)
                cached[name] = [each.num_cached for each in turns]
                fetched = [each.num_fetched > 0 for each in turns]
                assert fetched == ([False, True, True] if name == "over" else [False] * 3)
    assert cached["over"] == cached["one"] == [0, 80, 144]


async def test_a_link_that_is_too_slow_is_not_used(nodes: list[Path]) -> None:
    async with three_nodes(nodes, link=90.0) as made:  # over 10 s for a token
        _, second = await chat(made, 0, 1)
        assert second.num_cached == second.num_fetched == 0
        assert second.local.fetch_s == 0.0
        assert second.timings.prefill.fetch is None


@pytest.mark.ci
async def test_a_fetch_is_a_term_of_what_is_predicted(nodes: list[Path]) -> None:
    async with three_nodes(nodes, link=1e5) as made:
        first, second = await chat(made, 0, 1)
        assert second.local.fetch_s == pytest.approx(80 * 1000 / 1e5 + 0.004)
        assert second.timings.prefill.fetch is not None
        assert second.timings.prefill.fetch.predicted_s == second.local.fetch_s
        assert (first.num_fetched, second.num_cached) == (0, 80)


async def test_what_was_fetched_is_counted_where_it_is_shown(nodes: list[Path]) -> None:
    async with three_nodes(nodes) as made:
        _, second = await chat(made, 0, 1)
        num_bytes = 80 * made.decoder.layout.token_bytes
        assert second.num_fetched == num_bytes
        assert blocks_in(nodes[0]) & blocks_in(nodes[1])
        stores = {group.name: group.generation.prefix_store for group in (await made.state()).groups}
        assert (stores["group-0"].num_bytes_sent, stores["group-1"].num_bytes_fetched) == (num_bytes, num_bytes)
        samples = await made.metrics()
        assert samples['baton_prefix_fetched_bytes_total{group="group-1"}'] == num_bytes
        assert samples['baton_prefix_sent_bytes_total{group="group-0"}'] == num_bytes
        assert samples['baton_prefix_fetches_total{end="complete"}'] == 1


async def test_a_hint_that_is_wrong_costs_a_try(nodes: list[Path]) -> None:
    async with three_nodes(nodes) as made:
        first = await turn(made, FIRST, 0)
        for name in blocks_in(nodes[0]):
            (nodes[0] / name).unlink()
        second = await turn(made, first.then(20, seed=0), 1)
        assert (second.num_cached, second.num_fetched) == (0, 0)
        assert "is not in" in second.shortfall
        assert second.local.fetch_s == 0.0  # planned anew
        third = await turn(made, (*FIRST[:20], 3, 4), 1)  # its blocks have been computed there meanwhile
        assert third.num_cached == 16


async def test_a_source_that_is_gone_costs_a_try_and_gets_a_pause(nodes: list[Path]) -> None:
    async with three_nodes(nodes) as made:
        first = await turn(made, FIRST, 0)
        port = made.groups[0].port
        made.fronts[port] = "127.0.0.1:9"  # nothing answers there
        made.members.update(made.view())
        second = await turn(made, first.then(20, seed=0), 1)
        assert (second.num_cached, second.num_fetched) == (0, 0)
        assert second.shortfall
        assert len(made.server.orchestrator.scheduler.attempt_runner.chooser.context.sources._failed) == 1
        del made.fronts[port]
        made.members.update(made.view())


@pytest.mark.ci
async def test_a_node_without_room_computes(nodes: list[Path]) -> None:
    async with three_nodes(nodes, num_blocks=5) as made:
        first = await turn(made, FIRST, 0)
        store = made.groups[1].prefixes
        assert store is not None
        room = store.take([f"x{index}" for index in range(5)], TokenRange(0, 5 * BLOCK), BLOCK)
        try:
            second = await turn(made, first.then(20, seed=0), 1)
            assert (second.num_cached, second.num_fetched) == (0, 0)
            assert "no room" in second.shortfall
        finally:
            room.drop()


async def test_a_client_that_leaves_during_a_fetch_leaves_nothing_behind(nodes: list[Path]) -> None:
    async with three_nodes(nodes) as made:
        first = await turn(made, FIRST, 0)
        store = made.groups[1].prefixes
        assert store is not None
        made.members.undrain("group-1")
        made.members.drain("group-0")
        with store.locked():  # no block gets room meanwhile
            call = made.open(made.request(first.then(20, seed=0), PARAMS))
            await call.read()

            async def num_sent() -> int:
                return (await made.state()).groups[0].generation.prefix_store.num_bytes_sent

            await eventually(num_sent, lambda number: number > 0)
            call.cancel()
        again = await turn(made, first.then(20, seed=0), 1)
        assert again.num_cached == 80


@pytest.mark.ci
async def test_requests_that_begin_alike_fetch_their_blocks_once(nodes: list[Path]) -> None:
    async with three_nodes(nodes) as made:
        first = await turn(made, FIRST, 0)
        made.members.undrain("group-1")
        made.members.drain("group-0")
        asked = [first.then(20, seed=seed) for seed in range(6)]
        got = await asyncio.gather(*(made.ask(made.request(ids, PARAMS)) for ids in asked))
        for ids, answer in zip(asked, got, strict=True):
            assert answer.token_ids == reference_ids(made.decoder, ids, PARAMS)
            assert answer.end.usage.num_cached_tokens == 80
        (sent,) = [each.generation.prefix_store for each in (await made.state()).groups if each.name == "group-0"]
        assert sent.num_bytes_sent == 80 * made.decoder.layout.token_bytes
