"""Hosts the orchestrator: its server, and the cluster view that the supervisor pushes.

`deploy.ray_cluster.orchestrator` makes it in a Ray actor; this module knows nothing of Ray. Starts
`orchestrator.api.frontend`. Runs on its process's asyncio loop.
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
from orchestrator.membership.members import Members
from orchestrator.membership.view import ClusterView, Orders
from orchestrator.requests.config import OrchestratorConfig
from planning.planner import ChainPlanner
from text.tokenizer import Tokenizer


class OrchestratorHost:
    """One life of the orchestrator. Called only by the supervisor."""

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
        """Prepare a life of the orchestrator, without serving yet.

        `folder` holds the tokenizer; whether there is a chat template is read from it, whatever `model` says.
        Calibrations that `planner` is given later are kept at `calibration_path`. The process is pinned to `cores`;
        empty: not pinned.
        """
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
        """Start the server, once, over this view, under the orders of an earlier life.

        Returns the process id, the port and the port of the metrics. Raises ConfigError when the server cannot listen.
        """
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
        """Replace the cluster view and the orders that the supervisor has recorded; return the orders in force.

        The supervisor takes the answer as this process's heartbeat, too.
        """
        self._members.update(view)
        self._members.hear_kept(kept)
        return self._members.orders

    async def stop(self) -> None:
        """End all requests and the server."""
        if self._server is not None:
            await self._server.stop()
