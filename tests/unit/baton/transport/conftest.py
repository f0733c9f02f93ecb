"""Both ends of a KvReceiver, whose sessions push through shared memory or over gRPC."""

from collections.abc import AsyncIterator

import pytest

from tests.support.wire.kv_loopback import ROUTES, Loopback, loopback


@pytest.fixture(params=list(ROUTES.values()), ids=list(ROUTES))
async def loop(request: pytest.FixtureRequest) -> AsyncIterator[Loopback]:
    async with loopback(may_share=request.param) as both_ends:
        yield both_ends
