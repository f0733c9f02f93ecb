"""The gateway benchmark's clients find what a server does wrong: tokens missing or repeated, and lost ends."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from baton.errors import UnavailableError
from benchmarks.gateways.load import Load, Streams
from tests.support.clusters.scripted_orchestrator import Fault, ScriptedOrchestrator, serving

pytestmark = pytest.mark.integration


@asynccontextmanager
async def loading(*faults: Fault) -> AsyncIterator[Load]:
    async with serving(ScriptedOrchestrator(faults)) as target:
        made = Load(target)
        yield made
        await made.close()


async def test_streams_that_are_whole_are_done() -> None:
    async with loading() as load:
        await load.open(Streams(20, max_tokens=7, within_s=0.1))
        seen = await load.drain()
    assert (seen.num_done, seen.num_tokens, seen.errors) == (20, 140, [])
    assert len(seen.first_s) == 20 and len(seen.late_ms) == 140


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        (Fault(after=3, skip=1), "token 4 where 3 is due"),
        (Fault(after=3, repeat=1), "token 2 where 3 is due"),
        (Fault(after=3, end=True), "ended with"),
        (Fault(after=3, error=UnavailableError("gone")), "gone"),
        (Fault(error=UnavailableError("not today"), before_started=True), "not today"),
    ],
)
async def test_what_is_wrong_is_an_error(fault: Fault, text: str) -> None:
    async with loading(fault) as load:
        await load.open(Streams(1, max_tokens=7, within_s=0.0))
        seen = await load.drain()
    assert seen.num_done == 0 and [text in error for error in seen.errors] == [True]
