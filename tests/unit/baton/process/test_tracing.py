"""Spans that a process has made are exported however it ends."""

import asyncio
from contextlib import nullcontext

import pytest

from baton.errors import UnavailableError
from baton.process.tracing import exported_spans
from baton.settings.tracing import TraceExport
from tests.support.wire.collector import collector

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("error", [UnavailableError("away"), asyncio.CancelledError(), None])
async def test_the_last_spans_are_exported_however_the_block_is_left(error: BaseException | None) -> None:
    async with collector() as found:
        with nullcontext() if error is None else pytest.raises(type(error)):
            async with exported_spans(TraceExport(found.endpoint), {"baton.model": "tiny"}) as spans:
                assert spans is not None
                spans.get_tracer("test").start_span("last").end()
                if error is not None:
                    raise error
        assert len(found.named("last")) == 1
        assert found.resources[0]["baton.model"] == "tiny"


async def test_without_a_collector_there_are_no_spans() -> None:
    async with exported_spans(TraceExport(), {}) as spans:
        assert spans is None
