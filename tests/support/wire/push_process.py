"""One side of a push in a child process, `python -m tests.support.wire.push_process`, for tests that kill it.

`receive [UID]` serves one slot, as user UID if it is given, prints its endpoint, and ends with its standard input.
`send ENDPOINT SLOT STAMP` pushes the first layer repeatedly until it is killed.
"""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from baton.transport.channel import make_channel
from baton.transport.kv_routes import make_pool
from baton.transport.kv_sender import open_push
from baton.types import Lease, LeaseRef, RequestId, SlotId, Stamp, TokenRange
from tests.support.wire.kv_loopback import WIDE, loopback, rows

NUM_TOKENS = 6000
WHOLE = TokenRange(0, NUM_TOKENS)
NUM_REPEATS = 1000
"""Number of times that the layer is pushed: more than a test waits for."""


@asynccontextmanager
async def running(*arguments: str, under: tuple[str, ...] = ()) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run the process of one side, optionally started by the command `under`. Kill it at the end of the context."""
    process = await asyncio.create_subprocess_exec(
        *(*under, sys.executable, "-m", __name__, *arguments),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def receive(user: int | None) -> None:
    async with loopback(layout=WIDE, capacity_tokens=NUM_TOKENS) as loop:
        await asyncio.to_thread(os.getpid)  # starts the pool, whose imports the other user cannot read
        if user is not None:
            os.setuid(user)
        print(loop.endpoint, flush=True)
        await asyncio.to_thread(sys.stdin.read)


async def send(endpoint: str, ref: LeaseRef) -> None:
    lease = Lease(ref, RequestId("r"), 1, NUM_TOKENS, endpoint, 60.0)
    data = memoryview(rows(WHOLE, 0, WIDE))
    async with make_channel(endpoint) as channel:
        session = open_push(channel, WIDE, lease, pool=make_pool(WIDE))
        for _ in range(NUM_REPEATS):
            session.offer(0, WHOLE, data)
        await session.result()


if __name__ == "__main__":
    if sys.argv[1] == "receive":
        asyncio.run(receive(int(sys.argv[2]) if len(sys.argv) > 2 else None))
    else:
        asyncio.run(send(sys.argv[2], LeaseRef(SlotId(int(sys.argv[3])), Stamp(int(sys.argv[4])))))
