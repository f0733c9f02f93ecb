"""The orchestrator's host: drains go up to the supervisor with its heartbeats, and come back in the next life."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from baton.errors import ConfigError
from baton.results import ModelInfo
from orchestrator.api.host import OrchestratorHost
from orchestrator.membership.view import ClusterView, GenerationGroup, Orders
from orchestrator.requests.config import OrchestratorConfig
from tests.support.clusters.planners import linear_planner

HOST = "127.0.0.1"
MODEL = ModelInfo("letters", 64, 100, "float32", False, "layout")
VIEW = ClusterView(generation=(GenerationGroup("g", f"{HOST}:1", "layout", num_slots=4, max_slot_tokens=64),))


@asynccontextmanager
async def life(folder: Path) -> AsyncIterator[OrchestratorHost]:
    """One, on any core."""
    made = OrchestratorHost(folder, MODEL, (), OrchestratorConfig(), planner=linear_planner())
    try:
        yield made
    finally:
        await made.stop()


async def test_orders_are_told_with_each_heartbeat_and_hold_in_the_next_life(smollm2: Path) -> None:
    async with life(smollm2) as first:
        _, port, metrics_port = await first.serve(VIEW, HOST, 0, 0, Orders())
        assert await first.update(VIEW, Orders()) == Orders()
        first._members.drain("g")
        orders = await first.update(VIEW, Orders())
        assert orders == Orders(drained=frozenset({"g"}))
        assert not first._members.is_kept("g")  # the answer may have been lost
        await first.update(VIEW, orders)
        assert first._members.is_kept("g")
        first._members.dismiss("g")
        orders = await first.update(VIEW, orders)
        assert orders.leaving == {"g"}
    async with life(smollm2) as second:
        assert (await second.serve(VIEW, HOST, port, metrics_port, orders))[1:] == (port, metrics_port)
        assert second._members.view.generation == ()
        assert await second.update(ClusterView(), orders) == orders  # also while the group is not there
        await second.serve(VIEW, HOST, port, metrics_port, Orders())  # a new supervisor's, which knows of none
        assert await second.update(VIEW, orders) == orders


async def test_without_a_metrics_port_there_are_none(smollm2: Path) -> None:
    async with life(smollm2) as made:
        assert (await made.serve(VIEW, HOST, 0, None, Orders()))[2] is None


async def test_a_metrics_port_that_is_taken_ends_the_start(smollm2: Path) -> None:
    async with life(smollm2) as first, life(smollm2) as second:
        _, _, taken = await first.serve(VIEW, HOST, 0, 0, Orders())
        with pytest.raises(ConfigError, match="for metrics"):
            await second.serve(VIEW, HOST, 0, taken, Orders())
