"""The orchestrator's host: drains go up to the supervisor with its heartbeats, and come back when it restarts."""

import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from baton.client import AsyncClient
from baton.errors import BatonError, ConfigError, ModelError, VersionMismatchError
from baton.results.completion import ModelInfo
from baton.transport.channel import make_channel
from baton.transport.status_interceptor import translate_rpc_errors
from baton.v1 import keeping_pb2 as pb
from baton.v1.keeping_pb2_grpc import KeepingStub
from orchestrator.api.host import OrchestratorHost
from orchestrator.api.keeping import (
    model_to_proto,
    orders_from_proto,
    orders_to_proto,
    predictions_to_proto,
    view_to_proto,
)
from orchestrator.membership.view import ClusterView, GenerationGroup, Orders
from orchestrator.requests.config import OrchestratorConfig
from tests.support.clusters.planners import linear_planner
from tests.support.models.tiny_tokenizer import chat_letters, write_letters
from tests.support.wire.secret import SECRET

if TYPE_CHECKING:
    from baton.v1.keeping_pb2_grpc import KeepingAsyncStub

pytestmark = pytest.mark.integration

HOST = "127.0.0.1"
MODEL = ModelInfo("letters", 64, 100, "float32", False, "layout")
VIEW = ClusterView(generation=(GenerationGroup("g", f"{HOST}:1", "layout", num_slots=4, max_slot_tokens=64),))


class Life:
    """A host, and its supervisor's calls."""

    def __init__(self, host: OrchestratorHost, stub: "KeepingAsyncStub") -> None:
        self.members = host._members
        self._stub = stub

    async def update(self, view: ClusterView, kept: Orders) -> Orders:
        """The orders in force after that update."""
        request = pb.UpdateRequest(view=view_to_proto(view), kept=orders_to_proto(kept))
        return orders_from_proto((await self._stub.Update(request, timeout=60)).orders)

    async def serve(
        self, port: int = 0, metrics_port: int | None = None, timeout_s: float = 30.0
    ) -> tuple[int, int | None]:
        """The ports for clients and of the metrics."""
        request = pb.ServeRequest(
            model=model_to_proto(MODEL),
            host=HOST,
            port=port,
            metrics_port=metrics_port,
            predictions=predictions_to_proto(linear_planner()),
        )
        with translate_rpc_errors():
            status = await self._stub.Serve(request, timeout=timeout_s)
        return status.port, status.metrics_port if status.HasField("metrics_port") else None


@asynccontextmanager
async def incarnation(folder: Path) -> AsyncIterator[Life]:
    """One, on any core."""
    host = OrchestratorHost(folder, OrchestratorConfig(), host=HOST, secret=SECRET)
    try:
        await host.start()
        async with make_channel(f"{HOST}:{host.port}", secret=SECRET) as channel:
            yield Life(host, KeepingStub(channel))
    finally:
        await host.stop()


@pytest.fixture
def letters(tmp_path: Path) -> Path:
    """A folder with a tokenizer."""
    write_letters(tmp_path)
    return tmp_path


async def test_orders_are_told_with_each_heartbeat_and_hold_in_the_next_life(letters: Path) -> None:
    async with incarnation(letters) as first:
        assert await first.update(VIEW, Orders()) == Orders()
        port, metrics_port = await first.serve(metrics_port=0)
        assert await first.update(VIEW, Orders()) == Orders()
        first.members.drain("g")
        orders = await first.update(VIEW, Orders())
        assert orders == Orders(drained=frozenset({"g"}))
        assert not first.members.is_kept("g")  # the answer may have been lost
        await first.update(VIEW, orders)
        assert first.members.is_kept("g")
        first.members.dismiss("g")
        orders = await first.update(VIEW, orders)
        assert orders.leaving == {"g"}
    async with incarnation(letters) as second:
        await second.update(VIEW, orders)
        assert await second.serve(port, metrics_port) == (port, metrics_port)
        assert second.members.view.generation == ()
        assert await second.update(ClusterView(), orders) == orders  # also while the group is not there
        assert await second.update(VIEW, Orders()) == orders  # a new supervisor's, which knows of none
        assert await second.serve() == (port, metrics_port)
        assert await second.update(VIEW, orders) == orders


async def test_the_tokenizer_says_whether_there_is_a_chat_template(tmp_path: Path) -> None:
    chat_letters(tmp_path)
    assert not MODEL.has_chat_template
    async with incarnation(tmp_path) as made:
        await made.update(VIEW, Orders())
        port, _ = await made.serve()
        async with AsyncClient(f"{HOST}:{port}") as client:
            assert await client.model() == replace(MODEL, has_chat_template=True)


async def test_a_folder_without_a_tokenizer_ends_the_start(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no tokenizer\.json in "):
        async with incarnation(tmp_path):
            pass


async def test_without_a_metrics_port_there_are_none(letters: Path) -> None:
    async with incarnation(letters) as made:
        assert (await made.serve())[1] is None


async def test_a_metrics_port_that_is_taken_ends_the_start(letters: Path) -> None:
    async with incarnation(letters) as first, incarnation(letters) as second:
        _, taken = await first.serve(metrics_port=0)
        with pytest.raises(ConfigError, match="for metrics"):
            await second.serve(metrics_port=taken)


async def test_whoever_reaches_the_clients_port_alone_pushes_no_view(letters: Path) -> None:
    async with incarnation(letters) as made:
        await made.update(VIEW, Orders())
        port, _ = await made.serve()
        async with make_channel(f"{HOST}:{port}") as channel:
            with pytest.raises(VersionMismatchError), translate_rpc_errors():
                await KeepingStub(channel).Update(pb.UpdateRequest(), timeout=60)
        assert made.members.present == VIEW


async def test_a_start_that_its_supervisor_gave_up_leaves_nothing_behind(letters: Path) -> None:
    async with incarnation(letters) as made:
        for _ in range(20):  # at whatever the start has come to
            with contextlib.suppress(BatonError):
                await made.serve(timeout_s=1e-3)
        port, _ = await made.serve()
        assert port > 0
    async with incarnation(letters) as made:
        with contextlib.suppress(BatonError):
            await made.serve(timeout_s=5e-3)
