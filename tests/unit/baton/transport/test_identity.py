"""The secret of a cluster: what it is, where it is not shown, and that a call without it is refused unread."""

import pickle
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from baton.errors import ConfigError, UnauthenticatedError
from baton.settings.base import from_json, to_json
from baton.settings.place import WorkerPlace
from baton.transport.channel import make_channel
from baton.transport.identity import SECRET_KEY, ClusterSecret
from baton.transport.status_interceptor import translate_rpc_errors
from tests.support.wire.rpc import STREAM, UNARY, UPLOAD, Context, Service, served
from tests.support.wire.secret import SECRET

pytestmark = pytest.mark.integration

CALLS = ("unary_unary", UNARY), ("unary_stream", STREAM), ("stream_unary", UPLOAD)


class Untouched(Service):
    """Counts the calls that reach a method."""

    def __init__(self) -> None:
        self.num_calls = 0

    async def unary(self, request: bytes, context: Context) -> bytes:
        self.num_calls += 1
        return request

    async def stream(self, request: bytes, context: Context) -> AsyncIterator[bytes]:
        self.num_calls += 1
        yield request

    async def upload(self, requests: AsyncIterator[bytes], context: Context) -> bytes:
        self.num_calls += 1
        return b"".join([request async for request in requests])


async def call(channel: grpc.aio.Channel, kind: str, method: str, **options: object) -> bytes:
    """One call of any kind with a message, to its end; all that was answered."""

    async def requests() -> AsyncIterator[bytes]:
        yield b"message"

    made = getattr(channel, kind)(method)(requests() if kind == "stream_unary" else b"message", timeout=60, **options)
    with translate_rpc_errors():
        return b"".join([part async for part in made]) if kind == "unary_stream" else await made


async def test_a_channel_of_the_cluster_is_served() -> None:
    async with served(service := Untouched(), check=SECRET.check) as port:
        async with make_channel(f"127.0.0.1:{port}", secret=SECRET) as channel:
            for kind, method in CALLS:
                assert await call(channel, kind, method) == b"message"
                assert await call(channel, kind, method, metadata=(("x", "y"),)) == b"message"
        assert service.num_calls == 2 * len(CALLS)


@pytest.mark.parametrize("secret", ["", "5ec", "0" * 64, SECRET.text.upper(), f"{SECRET.text}0"])
async def test_a_call_with_another_secret_or_none_reaches_no_method(secret: str) -> None:
    metadata = ((SECRET_KEY, secret),) if secret else ()
    async with served(service := Untouched(), check=SECRET.check) as port:
        async with make_channel(f"127.0.0.1:{port}") as channel:
            for kind, method in CALLS:
                with pytest.raises(UnauthenticatedError, match="is for processes of this cluster") as caught:
                    await call(channel, kind, method, metadata=metadata)
                assert SECRET.text not in str(caught.value)
        assert service.num_calls == 0


async def test_a_refused_call_s_message_is_not_read() -> None:
    """The caller never sends one, and is refused all the same."""
    async with served(Service(), check=SECRET.check) as port, make_channel(f"127.0.0.1:{port}") as channel:
        upload: grpc.aio.StreamStreamCall[bytes, bytes] = channel.stream_stream(UNARY)(timeout=60)
        with pytest.raises(UnauthenticatedError), translate_rpc_errors():
            await upload.read()


def test_each_cluster_has_a_secret_of_its_own() -> None:
    assert len({ClusterSecret.new().text for _ in range(4)}) == 4
    assert all(len(ClusterSecret.new().text) == 64 for _ in range(4))


@pytest.mark.parametrize("text", ["", "x" * 64, "5ec", "5EC" + "0" * 61, SECRET.text + "\n"])
def test_a_text_that_is_no_secret_is_refused_and_not_shown(text: str) -> None:
    with pytest.raises(ConfigError, match="the cluster's secret is") as caught:
        ClusterSecret(text)
    assert not text or text not in str(caught.value)


def test_a_secret_is_not_shown_by_what_holds_it() -> None:
    place = WorkerPlace(model_folder=Path("model"), secret=SECRET.text)
    assert SECRET.text not in f"{SECRET!r} {SECRET} {place!r} {place} {replace(place, num_threads=2)}"
    assert from_json(WorkerPlace, to_json(place)).secret == SECRET.text
    assert pickle.loads(pickle.dumps(SECRET)) == SECRET
