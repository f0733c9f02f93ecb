"""Prompts that begin alike, through real ranks: what is missing is computed, and tokens are those of a cold start."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from baton import AsyncClient
from baton.sampling_params import SamplingParams
from baton.types import RequestId, TokenRange
from orchestrator.requests.config import OrchestratorConfig
from orchestrator.requests.request import Request
from orchestrator.requests.tenants import Tenant, Tenants, hash_key
from tests.support.clusters.clients import HOST
from tests.support.clusters.cluster import BareCluster, cluster
from tests.support.clusters.turns import ask_turn, generate
from tests.support.engines.generation import prompt, reference_ids
from tests.support.engines.prefixes import blocks_in, file_bytes, mapped
from tests.support.eventually import eventually
from tests.support.models.tiny_models import random_decoder

pytestmark = pytest.mark.integration

BLOCK = 16
CONFIG = OrchestratorConfig(block_tokens=BLOCK, report_wait_s=60)
PARAMS = SamplingParams(max_tokens=3, ignore_eos=True)
SHARED = prompt(100)


@asynccontextmanager
async def keeping(folder: Path, *, num_ranks: int = 2, num_blocks: int = 1000) -> AsyncIterator[BareCluster]:
    """A relay whose ranks have room for so many blocks."""
    size = file_bytes(random_decoder().layout, BLOCK)
    folders, most = {"prefill": folder}, num_blocks * size
    async with cluster(num_ranks=num_ranks, config=CONFIG, folders=folders, prefix_bytes=most) as made:
        yield made


async def answer(made: BareCluster, prompt_ids: tuple[int, ...]) -> int:
    """Ask, check who computed and pushed what, and return the number of cached tokens."""
    turn = await ask_turn(made, prompt_ids, PARAMS)
    ranks = turn.timings.prefill.ranks
    assert (ranks[0].tokens.start, ranks[-1].tokens.end) == (turn.num_cached, len(prompt_ids))
    assert turn.num_pushed == len(prompt_ids)
    return turn.num_cached


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
async def test_what_is_missing_is_computed_from_any_block_on(folder: Path, num_ranks: int) -> None:
    async with keeping(folder, num_ranks=num_ranks) as made:
        assert await answer(made, SHARED) == 0
        assert len(blocks_in(folder)) == 6
        for num_shared in (0, 15, 16, 17, 32, 63, 80, 96, 97):
            ids = (*SHARED[:num_shared], 96 - SHARED[num_shared], *prompt(20, seed=num_shared))
            assert await answer(made, ids) == num_shared // BLOCK * BLOCK


async def test_the_same_prompt_again_computes_its_last_block_at_least(folder: Path) -> None:
    async with keeping(folder) as made:
        for num_tokens, cached in ((96, 80), (97, 96), (16, 0), (17, 16)):
            ids = prompt(num_tokens, seed=7)
            assert await answer(made, ids) == 0
            assert await answer(made, ids) == cached


async def test_sampled_tokens_and_choices_do_not_depend_on_what_is_cached(folder: Path) -> None:
    params = SamplingParams(max_tokens=8, temperature=0.9, top_p=0.95, seed=5, ignore_eos=True, n=2)
    async with keeping(folder) as made:
        cold = await made.ask(made.request(SHARED, params))
        warm = await made.ask(made.request(SHARED, params))
        assert warm.end.usage.num_cached_tokens == 96
        assert (warm.token_ids, warm.others) == (cold.token_ids, cold.others)


async def test_a_hint_that_is_wrong_costs_a_recompute_in_the_same_attempt(folder: Path) -> None:
    async with keeping(folder) as made:
        await answer(made, SHARED)
        for name in sorted(blocks_in(folder))[:3]:
            (folder / name).unlink()
        assert await answer(made, SHARED) == 0
        assert len(blocks_in(folder)) == 6
        assert await answer(made, SHARED) == 96


async def test_a_spoiled_block_costs_a_recompute_and_is_replaced(folder: Path) -> None:
    async with keeping(folder) as made:
        await answer(made, SHARED)
        for name in blocks_in(folder):
            (folder / name).chmod(0o600)
            (folder / name).write_bytes(b"something else")
        assert await answer(made, SHARED) == 0
        assert await answer(made, SHARED) == 96


@pytest.mark.parametrize("isolated", [True, False])
async def test_isolated_tenants_share_nothing(folder: Path, isolated: bool) -> None:
    """They are isolated unless the operator says otherwise."""
    config = CONFIG if isolated else replace(CONFIG, prefix_isolation=False)
    cached: list[int] = []
    async with cluster(config=config, folders={"prefill": folder}) as made:
        for tenant in ("a", "b", "b", "a"):
            asked = Request(RequestId(f"{len(cached)}"), SHARED, PARAMS, tenant=Tenant(tenant))
            cached.append((await generate(made, asked)).usage.num_cached_tokens)
        assert cached == ([0, 0, 96, 96] if isolated else [0, 96, 96, 96])
        assert len(blocks_in(folder)) == (12 if isolated else 6)


async def test_callers_with_keys_of_two_tenants_share_nothing_by_default(folder: Path) -> None:
    tenants = Tenants(tuple(Tenant(name, key_hashes=(hash_key(f"key-{name}"),)) for name in "ab"))
    cached: list[int] = []
    async with cluster(config=replace(CONFIG, tenants=tenants), folders={"prefill": folder}) as made:
        for name in ("a", "a", "b", "b"):
            async with AsyncClient(f"{HOST}:{made.server.port}", api_key=f"key-{name}") as client:
                usage = (await client.generate(token_ids=SHARED, params=PARAMS).collect()).usage
            assert usage is not None
            cached.append(usage.num_cached_tokens)
    assert cached == [0, 96, 0, 96]


async def test_isolation_leaves_the_blocks_of_calls_without_a_tenant_as_they_are(folder: Path) -> None:
    names: list[set[str]] = []
    for config in (replace(CONFIG, prefix_isolation=False), CONFIG):
        async with cluster(config=config, folders={"prefill": folder}) as made:
            await answer(made, SHARED)
            names.append(set(blocks_in(folder)))
    assert names[0] == names[1] and len(names[0]) == 6


async def test_only_requests_of_one_salt_share_a_prefix(folder: Path) -> None:
    cached: list[int] = []
    async with cluster(config=replace(CONFIG, prefix_isolation=True), folders={"prefill": folder}) as made:
        for tenant, salt in (("a", "x"), ("a", ""), ("a", "y"), ("b", "x"), ("a", "x")):
            asked = Request(RequestId(f"{len(cached)}"), SHARED, PARAMS, tenant=Tenant(tenant), prefix_salt=salt)
            cached.append((await generate(made, asked)).usage.num_cached_tokens)
    assert cached == [0, 0, 0, 0, 96]


async def test_nothing_is_cached_without_a_store() -> None:
    async with cluster(config=CONFIG) as made:
        assert [await answer(made, SHARED) for _ in range(2)] == [0, 0]


async def test_a_store_that_is_full_forgets_what_was_used_longest_ago(folder: Path) -> None:
    others = [prompt(40, seed=seed) for seed in range(3)]
    async with keeping(folder, num_blocks=4) as made:
        assert [await answer(made, ids) for ids in others] == [0, 0, 0]
        assert len(blocks_in(folder)) == 4
        assert [await answer(made, ids) for ids in reversed(others)] == [32, 32, 0]


async def test_what_is_read_stays_while_others_need_room(folder: Path) -> None:
    """The rank stands still behind its prefix, while another job wants all the room."""
    async with keeping(folder, num_ranks=1, num_blocks=6) as made:
        await answer(made, SHARED)
        made.rank_gates[0].shut()
        reading = asyncio.create_task(answer(made, (*SHARED, 1)))
        await made.rank_gates[0].until_reached()
        store = made.ranks[0].prefixes
        assert store is not None
        room = store.take(["x"], TokenRange(0, BLOCK), BLOCK)
        assert (room.writers, room.evicted) == ([], [])
        made.rank_gates[0].open()
        assert await reading == 96


async def test_a_request_that_leaves_keeps_nothing(folder: Path) -> None:
    async with keeping(folder) as made:
        made.rank_gates[1].shut()
        call = made.open(made.request(SHARED, PARAMS))
        await made.rank_gates[1].until_reached()
        call.cancel()
        await eventually(made.state, lambda state: state.num_running == 0)
        made.rank_gates[1].open()
        await eventually(lambda: asyncio.to_thread(blocks_in, folder), lambda left: not left)
        await eventually(lambda: asyncio.to_thread(mapped, folder), lambda left: not left)


@pytest.mark.parametrize("seed", range(2))
async def test_many_prompts_at_once_over_a_store_that_is_too_small(seed: int, folder: Path) -> None:
    """Hints go stale all the time: nobody notices but by computing more."""
    rng = random.Random(seed)
    stems = [prompt(96, seed=stem) for stem in range(3)]
    asked = [(*rng.choice(stems)[: rng.randrange(1, 96)], *prompt(rng.randrange(1, 40), seed=n)) for n in range(40)]
    async with keeping(folder, num_blocks=8) as made:
        answers = await asyncio.gather(*(made.ask(made.request(ids, PARAMS)) for ids in asked))
        for ids, got in zip(asked, answers, strict=True):
            assert got.token_ids == reference_ids(made.decoder, ids, PARAMS)
            assert got.end.usage.num_attempts == 1
        assert len(blocks_in(folder)) <= 8
