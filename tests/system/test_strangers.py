"""Every method of every service between a cluster's processes answers UNAUTHENTICATED to a caller without the cluster's
secret. The service for clients requires no secret.

Services are found by their descriptors. A new service fails this test until `served` starts it. A new method is called
without changes here.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from importlib import import_module
from pathlib import Path

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor

import baton.v1
from baton.transport.channel import make_channel
from baton.transport.identity import SECRET_KEY, ClusterSecret
from orchestrator.api.host import OrchestratorHost
from orchestrator.requests.config import OrchestratorConfig
from tests.support.clusters.clients import HOST
from tests.support.clusters.cluster import cluster
from tests.support.models.tiny_tokenizer import write_letters
from tests.support.wire.secret import SECRET

pytestmark = pytest.mark.integration

OF_CLIENTS = "Orchestrator"
"""The one service for clients, who have keys and no secret."""
NO_MESSAGE = b"\xff"
"""Bytes that no message has: a server that reads them fails in another way."""


def services() -> Iterator[ServiceDescriptor]:
    """All that are in proto/baton/v1."""
    (folder,) = baton.v1.__path__
    for path in sorted(Path(folder).glob("*_pb2.py")):
        yield from import_module(f"baton.v1.{path.stem}").DESCRIPTOR.services_by_name.values()


METHODS = [method for service in services() for method in service.methods]


@asynccontextmanager
async def served(folder: Path) -> AsyncIterator[dict[str, int]]:
    """The port of each service, by its name: of a rank, a generation group, an orchestrator and its host."""
    async with AsyncExitStack() as stack:
        made = await stack.enter_async_context(cluster(num_ranks=1, folders={"generate": folder / "blocks"}))
        host = OrchestratorHost(write_letters(folder), OrchestratorConfig(), host=HOST, secret=SECRET)
        await host.start()
        stack.push_async_callback(host.stop)
        group, rank, front = made.groups[0].port, made.ranks[0].port, made.server.port
        yield {
            "GenerationGroup": group,
            "KvReceiver": group,
            "BlockExchange": group,
            "PrefillRank": rank,
            "Keeping": host.port,
            "Admin": front,
            "Planning": front,
            OF_CLIENTS: front,
        }


async def status(
    channel: grpc.aio.Channel, method: MethodDescriptor, secret: str | None, *, sends: bool = True
) -> grpc.StatusCode:
    """The status of a call with corrupt bytes as its message; a stream may send none. No answer contains the secret."""
    kind = f"{'stream' if method.client_streaming else 'unary'}_{'stream' if method.server_streaming else 'unary'}"
    path = f"/{method.containing_service.full_name}/{method.name}"
    metadata = () if secret is None else ((SECRET_KEY, secret),)
    ended = asyncio.Event()

    async def requests() -> AsyncIterator[bytes]:
        if sends:
            yield NO_MESSAGE
        await ended.wait()

    message = requests() if method.client_streaming else NO_MESSAGE
    call = getattr(channel, kind)(path)(message, metadata=metadata, timeout=60)
    call.add_done_callback(lambda _: ended.set())
    answered = f"{await call.initial_metadata()} {await call.trailing_metadata()} {await call.details()}"
    assert SECRET.text not in answered
    code: grpc.StatusCode = await call.code()
    return code


@pytest.fixture
async def ports(tmp_path: Path) -> AsyncIterator[dict[str, int]]:
    async with served(tmp_path) as made:
        yield made


async def test_every_method_asks_for_the_secret_before_it_reads_a_message(ports: dict[str, int]) -> None:
    for method in METHODS:
        name = method.containing_service.name
        async with make_channel(f"{HOST}:{ports[name]}") as channel:
            for secret in (None, "", ClusterSecret.new().text, SECRET.text[:-1]):
                # A stream is refused before it sends: a message on its way to a call that has ended is an error, too.
                code = await status(channel, method, secret, sends=False)
                is_refused = code is grpc.StatusCode.UNAUTHENTICATED
                assert is_refused == (name != OF_CLIENTS), f"{name}.{method.name} with {secret!r}: {code}"
            # It is read now, and is no message: all that is refused above is refused for the secret.
            code = await status(channel, method, SECRET.text)
            assert code not in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.OK), f"{name}.{method.name}: {code}"
