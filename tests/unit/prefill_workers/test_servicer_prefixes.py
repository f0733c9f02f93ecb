"""A prefill group over gRPC and the prefix store of its node: jobs begin behind what is there, and fill it."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from baton.errors import BatonError, InvalidArgumentError, StalePrefixError
from baton.modeling.prefix_store.node import DiskPlace
from baton.sampling_params import SamplingParams
from baton.transport.proto_types import history_to_proto
from baton.types import LeaseRef, Stamp
from baton.v1 import common_pb2, prefill_pb2
from tests.support.engines.chains import cached_prefix
from tests.support.engines.prefill_servers import CHUNKS, IDS, TIMEOUT_S, Ranks, two_ranks
from tests.support.engines.prefixes import PLENTY, blocks_in, file_bytes, hung, keep, mapped, prefix_folder, store_in
from tests.support.eventually import eventually
from tests.support.manual_clock import ManualClock
from tests.support.models.damaged import DAMAGED, DamagedDecoder
from tests.support.models.tiny_models import random_decoder

pytestmark = pytest.mark.integration


async def nothing_mapped(folder: Path) -> None:
    await eventually(lambda: asyncio.to_thread(mapped, folder), lambda left: not left, TIMEOUT_S)


BLOCK = 4
NAMES = tuple(f"block-{index}" for index in range(7))
"""Blocks of the prompt's first 28 tokens."""


def put(ranks: Ranks, folder: Path, num_blocks: int) -> None:
    """The prompt's first blocks, as an earlier job would have kept them."""
    names = NAMES[:num_blocks]
    keep(store_in(folder, ranks.decoder.layout), cached_prefix(ranks.decoder, IDS, num_blocks * BLOCK), names)


def behind(job: prefill_pb2.PrefillJob, num_blocks: int) -> prefill_pb2.PrefillJob:
    """The same, begun behind these blocks; all others are to be kept."""
    job.prefix_blocks[:], job.keep_blocks[:], job.block_tokens = NAMES[:num_blocks], NAMES[num_blocks:], BLOCK
    job.chunks[0].start = num_blocks * BLOCK
    job.chunks[0].end = job.chunks[1].start = max(CHUNKS[0].end, num_blocks * BLOCK + 1)
    return job


@pytest.fixture
async def ranks(folder: Path) -> AsyncIterator[Ranks]:
    """Two ranks of a node with a prefix store."""
    async with two_ranks(folder) as made:
        await made.start_epoch()
        yield made


async def test_job_behind_a_prefix_of_the_node(ranks: Ranks, folder: Path) -> None:
    put(ranks, folder, 2)
    lease = await ranks.lease()
    job = behind(ranks.job(lease), 2)
    job.chunks[0].start = 7  # of the last block it may use less
    del job.keep_blocks[:]
    reports = await asyncio.gather(ranks.run(0, job), ranks.run(1, job))
    assert [report.timing.num_bytes_sent for report in reports] == [6 * ranks.decoder.layout.token_bytes, 0]
    ranks.check_slot(lease)
    await nothing_mapped(folder)  # while the ranks live on


async def test_a_finished_job_is_kept_and_the_next_begins_behind_it(ranks: Ranks, folder: Path) -> None:
    """However many blocks were there before; the slot gets all of the prompt each time."""
    for num_blocks in (0, 7, 3, 5):
        for name in NAMES[num_blocks:]:
            (folder / name).unlink(missing_ok=True)
        lease = await ranks.lease()
        job = behind(ranks.job(lease), num_blocks)
        first, last = await asyncio.gather(ranks.run(0, job), ranks.run(1, job))
        assert (tuple(first.stored_blocks), tuple(last.stored_blocks)) == ((), NAMES[num_blocks:])
        assert (
            first.timing.num_bytes_pushed + last.timing.num_bytes_pushed == len(IDS) * ranks.decoder.layout.token_bytes
        )
        ranks.check_slot(lease)
        ranks.receiver.sink.abort(lease.ref)
    store = (await ranks.status(0)).prefix_store
    assert (store.num_blocks, store.limit_bytes) == (7, PLENTY)
    assert store.num_bytes == 7 * file_bytes(ranks.decoder.layout, BLOCK)
    assert store.identity == (await ranks.status(1)).prefix_store.identity != ""
    await nothing_mapped(folder)


async def test_what_is_missing_is_stale_on_every_rank_and_nothing_is_pushed(ranks: Ranks, folder: Path) -> None:
    put(ranks, folder, 3)
    (folder / NAMES[1]).unlink()
    lease = await ranks.lease()
    job = behind(ranks.job(lease), 3)
    for rank in (0, 1):
        with pytest.raises(StalePrefixError, match="block-1 is not in"):
            await ranks.run(rank, job)
    whole = behind(ranks.job(lease), 0)
    await asyncio.gather(ranks.run(0, whole), ranks.run(1, whole))
    ranks.check_slot(lease)


@pytest.mark.parametrize(
    ("field_name", "value"),
    [("prefix_blocks", ["../p"]), ("prefix_blocks", [NAMES[0]]), ("prefix_blocks", []), ("block_tokens", 0)],
)
async def test_prefix_that_does_not_fit_the_job_is_refused(
    ranks: Ranks, folder: Path, field_name: str, value: object
) -> None:
    put(ranks, folder, 2)
    job = behind(ranks.job(await ranks.lease()), 2)
    if isinstance(value, list):
        job.prefix_blocks[:] = value
    else:
        job.block_tokens = 0
    with pytest.raises(InvalidArgumentError):
        await ranks.run(0, job)


async def test_blocks_to_keep_are_whole_blocks_of_the_prompt(ranks: Ranks, folder: Path) -> None:
    job = behind(ranks.job(await ranks.lease()), 0)
    job.keep_blocks.append("one-too-many")
    with pytest.raises(InvalidArgumentError, match=r"keep_blocks are tokens \[0, 32\)"):
        await ranks.run(1, job)


async def test_a_job_that_fails_keeps_nothing_and_lets_its_prefix_go(ranks: Ranks, folder: Path) -> None:
    put(ranks, folder, 2)
    lease = await ranks.lease()
    stale = dataclasses.replace(lease, ref=LeaseRef(lease.ref.slot, Stamp(lease.ref.stamp + 7)))
    job = behind(ranks.job(stale), 2)
    errors = await asyncio.gather(ranks.run(0, job), ranks.run(1, job), return_exceptions=True)
    assert all(isinstance(error, BatonError) for error in errors)
    await nothing_mapped(folder)  # while the ranks live on
    assert blocks_in(folder) == set(NAMES[:2])


async def test_a_prompt_whose_logits_are_not_finite_keeps_nothing(folder: Path) -> None:
    sound = random_decoder(num_layers=3)
    async with two_ranks(folder, decoder=DamagedDecoder(sound.config, sound.weights)) as ranks:
        await ranks.start_epoch()
        job = behind(ranks.job(await ranks.lease()), 0)
        job.history.CopyFrom(history_to_proto((*IDS[:9], DAMAGED, *IDS[10:25]), IDS[25:], SamplingParams()))
        _, error = await asyncio.gather(ranks.run(0, job), ranks.run(1, job), return_exceptions=True)
        assert isinstance(error, BatonError) and "are not finite" in str(error)
        assert blocks_in(folder) == set()


async def test_a_cancelled_job_keeps_nothing(ranks: Ranks, folder: Path) -> None:
    call = ranks.stubs[1].Run(behind(ranks.job(await ranks.lease()), 0))
    await eventually(lambda: ranks.status(1), lambda status: status.num_jobs == 1, TIMEOUT_S)
    assert blocks_in(folder)
    call.cancel()
    await eventually(lambda: asyncio.to_thread(blocks_in, folder), lambda left: not left, TIMEOUT_S)
    await nothing_mapped(folder)


async def test_heartbeats_do_not_wait_for_blocks(ranks: Ranks, folder: Path) -> None:
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    job = behind(ranks.job(await ranks.lease()), 0)
    with store_in(folder, ranks.decoder.layout).locked():  # the last rank waits for room
        running = [asyncio.create_task(ranks.run(rank, job)) for rank in (1, 0)]
        await eventually(lambda: ranks.status(0), lambda status: status.num_jobs == 1, TIMEOUT_S)
        for _ in range(10):
            assert (await ranks.status(1)).num_jobs == 0
    last, _ = await asyncio.gather(*running)
    assert tuple(last.stored_blocks) == NAMES


async def test_a_disk_that_never_answers_delays_neither_start_nor_prompts_nor_heartbeats(tmp_path: Path) -> None:
    disk = DiskPlace(tmp_path / "disk", PLENTY, answer_s=0.01)
    with prefix_folder() as folder:
        with hung(disk.folder):
            async with two_ranks(folder, disk) as ranks:
                await ranks.start_epoch()
                asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
                lease = await ranks.lease()
                job = behind(ranks.job(lease), 0)
                _, last = await asyncio.gather(ranks.run(0, job), ranks.run(1, job))
                ranks.check_slot(lease)
                assert tuple(last.stored_blocks) == NAMES
                listed = await ranks.stubs[1].ListPrefixBlocks(common_pb2.ListPrefixBlocksRequest(), timeout=TIMEOUT_S)
                assert set(listed.blocks) == set(NAMES)
                for _ in range(10):
                    store = (await ranks.status(1)).prefix_store
                    assert (store.num_blocks, store.num_disk_bytes) == (7, 0)
                    assert store.disk_fault.startswith(f"{disk.folder} does not answer")
        await eventually(partial(asyncio.to_thread, disk.folder.exists), lambda exists: not exists, TIMEOUT_S)


async def test_rank_that_waits_long_for_blocks_fails_no_job_and_no_epoch() -> None:
    """Longer than a job is waited for that nobody announces, which is half a floor, and than a silent rank is."""
    clock, floor_s = ManualClock(100.0), 0.4
    with prefix_folder() as folder:
        async with two_ranks(folder, watchdog_floor_s=floor_s, clock=clock) as ranks:
            await ranks.start_epoch()
            job = behind(ranks.job(await ranks.lease()), 0)
            with store_in(folder, ranks.decoder.layout).locked():  # the last rank waits for room
                running = [asyncio.create_task(ranks.run(rank, job)) for rank in (0, 1)]
                reached = 3  # all layers are computed
                for _ in range(9):
                    shown = await eventually(lambda: ranks.status(0), progress_of(reached), TIMEOUT_S)
                    clock.advance(0.3 * floor_s)
                    reached = shown.progress + 1  # another sign of life
            _, last = await asyncio.gather(*running)
            assert tuple(last.stored_blocks) == NAMES
            assert [(await ranks.status(rank)).epoch_error for rank in (0, 1)] == ["", ""]


def progress_of(least: int) -> Callable[[prefill_pb2.PrefillStatus], bool]:
    return lambda status: status.progress >= least


async def test_reports_do_not_wait_for_the_disk_and_say_later_what_had_to_go_there(tmp_path: Path) -> None:
    layout = random_decoder(num_layers=3).layout
    disk = DiskPlace(tmp_path / "disk", 7 * file_bytes(layout, BLOCK))
    others = [f"other-{index}" for index in range(7)]

    async def keep_on_disk(ranks: Ranks, folder: Path, names: Sequence[str]) -> set[str]:
        """Blocks that the last rank evicted, by its report."""
        lease = await ranks.lease()
        job = behind(ranks.job(lease), 0)
        job.keep_blocks[:] = names
        with store_in(disk.folder, layout).locked():  # nothing sinks
            _, last = await asyncio.gather(ranks.run(0, job), ranks.run(1, job))
        ranks.receiver.sink.abort(lease.ref)
        assert list(last.stored_blocks) == list(names)
        if names:
            await eventually(
                partial(asyncio.to_thread, blocks_in, disk.folder), lambda held: held == set(names), TIMEOUT_S
            )
        for name in names:
            (folder / name).unlink()
        return set(last.evicted_blocks)

    with prefix_folder() as folder:
        async with two_ranks(folder, disk) as ranks:
            await ranks.start_epoch()
            assert not await keep_on_disk(ranks, folder, others)
            assert not await keep_on_disk(ranks, folder, NAMES)
            await eventually(partial(keep_on_disk, ranks, folder, []), lambda gone: gone == set(others), TIMEOUT_S)
        assert not disk.folder.exists()


async def test_the_last_rank_of_a_node_removes_its_folder() -> None:
    with prefix_folder() as folder:
        async with two_ranks(folder) as ranks:
            put(ranks, folder, 2)
            await ranks.servers[0].stop()
            assert blocks_in(folder) == set(NAMES[:2])
        assert not folder.exists()


async def test_rank_without_a_prefix_store_has_nothing_and_keeps_nothing() -> None:
    async with two_ranks() as ranks:
        await ranks.start_epoch()
        lease = await ranks.lease()
        with pytest.raises(StalePrefixError, match="this rank has no prefix store: prefill without them"):
            await ranks.run(0, behind(ranks.job(lease), 2))
        job = behind(ranks.job(lease), 0)
        _, last = await asyncio.gather(ranks.run(0, job), ranks.run(1, job))
        assert not last.stored_blocks
        assert not (await ranks.status(0)).HasField("prefix_store")
