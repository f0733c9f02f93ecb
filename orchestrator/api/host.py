"""The host of the orchestrator: its server, and the cluster view that the supervisor pushes.

deploy makes it a Ray actor; it knows nothing of Ray. Runs on that process's asyncio loop.
"""

import asyncio
import logging
import os
from collections.abc import Sequence
from pathlib import Path

from baton.clock import SystemClock
from baton.process.cores import pin
from baton.process.garbage import collect_rarely
from baton.results import ModelInfo
from orchestrator.api.frontend import OrchestratorServer
from orchestrator.membership.members import ClusterView, Members, Orders
from orchestrator.requests.config import OrchestratorConfig
from planning.planner import ChainPlanner
from text.tokenizer import Tokenizer


class OrchestratorHost:
    """One life of the orchestrator. Called by the supervisor only."""

    def __init__(
        self,
        folder: Path,
        model: ModelInfo,
        eos_token_ids: Sequence[int],
        config: OrchestratorConfig,
        *,
        planner: ChainPlanner,
        calibration_path: Path | None = None,
        cores: Sequence[int] = (),
    ) -> None:
        """`folder` holds the tokenizer; chat templates are asked of it, whatever `model` says of them. Calibrations
        that `planner` is given later are kept at `calibration_path`. The process is pinned to `cores`; empty: not
        pinned."""
        pin(cores)
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
        self._folder = folder
        self._model = model
        self._eos_token_ids = tuple(eos_token_ids)
        self._config = config
        self._planner = planner
        self._calibration_path = calibration_path
        self._members = Members()
        self._server: OrchestratorServer | None = None
        self._starting = asyncio.Lock()

    async def serve(
        self, view: ClusterView, host: str, port: int, metrics_port: int | None, orders: Orders
    ) -> tuple[int, int, int | None]:
        """Starts the server, once, over that view, under orders that an earlier life got; (process id, port, port of
        the metrics). Raises ConfigError when it cannot listen."""
        self._members.update(view)
        async with self._starting:
            if self._server is None:
                self._members.keep_orders(orders)
                self._members.hear_kept(orders)
                tokenizer = await asyncio.to_thread(Tokenizer.load, self._folder)
                self._server = await OrchestratorServer.start(
                    self._members,
                    tokenizer,
                    self._model,
                    clock=SystemClock(),
                    host=host,
                    port=port,
                    eos_token_ids=self._eos_token_ids,
                    config=self._config,
                    planner=self._planner,
                    calibration_path=self._calibration_path,
                    metrics_port=metrics_port,
                )
                collect_rarely()
            return os.getpid(), self._server.port, self._server.metrics_port

    async def update(self, view: ClusterView, kept: Orders) -> Orders:
        """The cluster is like this now, and the sender has `kept` these orders; those in force. The answer is also this
        process's heartbeat."""
        self._members.update(view)
        self._members.hear_kept(kept)
        return self._members.orders

    async def stop(self) -> None:
        """Ends all requests and the server."""
        if self._server is not None:
            await self._server.stop()
