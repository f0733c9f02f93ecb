"""Giving a stream up, from wherever: its request ends on the server, and whoever waits for it is woken."""

import asyncio

import pytest

from baton import AsyncClient, Client
from baton.errors import RequestCancelledError
from baton.types import FinishReason
from tests.support.clusters.scripted_orchestrator import Fault, ScriptedOrchestrator, serving, text_of
from tests.support.eventually import eventually

pytestmark = pytest.mark.integration

WAIT_S = 60.0


async def test_cancel_ends_the_request_on_the_server() -> None:
    service = ScriptedOrchestrator([Fault(after=1, hang=True)])
    async with serving(service) as target, AsyncClient(target) as client:
        stream = client.generate("Once")
        assert (await anext(stream)).index == 0
        stream.cancel()
        with pytest.raises(RequestCancelledError, match="cancelled by its client"):
            await anext(stream)
        await asyncio.wait_for(service.cancelled.wait(), WAIT_S)
        assert stream.finish is FinishReason.CANCELLED
        with pytest.raises(RequestCancelledError):
            await stream.collect()


async def test_cancel_wakes_the_task_that_waits() -> None:
    service = ScriptedOrchestrator([Fault(hang=True)])
    async with serving(service) as target, AsyncClient(target) as client:
        stream = client.generate("Once")
        waiting = asyncio.create_task(stream.collect())
        await asyncio.wait_for(service.hanging.wait(), WAIT_S)
        stream.cancel()
        with pytest.raises(RequestCancelledError):
            await asyncio.wait_for(waiting, WAIT_S)


async def test_cancelling_the_task_cancels_the_request() -> None:
    service = ScriptedOrchestrator([Fault(hang=True)])
    async with serving(service) as target, AsyncClient(target) as client:
        waiting = asyncio.create_task(client.generate("Once").collect())
        await asyncio.wait_for(service.hanging.wait(), WAIT_S)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await asyncio.wait_for(service.cancelled.wait(), WAIT_S)


async def test_cancel_from_another_thread_wakes_the_reader() -> None:
    service = ScriptedOrchestrator([Fault(after=1, hang=True)])
    async with serving(service) as target:
        with Client(target) as client:
            stream = client.generate("Once")
            reading = asyncio.create_task(asyncio.to_thread(stream.collect))
            await asyncio.wait_for(service.hanging.wait(), WAIT_S)

            async def num_tokens() -> int:
                return len(stream.output.tokens)

            await eventually(num_tokens, lambda number: number == 1, within_s=WAIT_S)
            stream.cancel()
            with pytest.raises(RequestCancelledError):
                await asyncio.wait_for(reading, WAIT_S)
            await asyncio.wait_for(service.cancelled.wait(), WAIT_S)
            assert len(stream.output.tokens) == 1


async def test_leaving_a_stream_cancels_it() -> None:
    service = ScriptedOrchestrator([Fault(after=1, hang=True)])
    async with serving(service) as target, AsyncClient(target) as client:
        async with client.generate("Once") as stream:
            assert (await anext(stream)).index == 0
        await asyncio.wait_for(service.cancelled.wait(), WAIT_S)
        assert stream.finish is FinishReason.CANCELLED


async def test_leaving_a_finished_stream_changes_nothing() -> None:
    async with serving(ScriptedOrchestrator()) as target, AsyncClient(target) as client:
        async with client.generate("Once", max_tokens=2) as stream:
            await stream.collect()
        assert await stream.text() == text_of(2)
