"""Runs the autoscaler of a cluster at regular intervals, publishes its decisions, and applies them.

Each decision is explained in metrics, in `baton status` and, if it differs from the previous one, in the log. In mode
`advise`, decisions are not applied. Built by `orchestrator.composition`. Runs on the asyncio loop.
"""

import asyncio
import logging
from collections import deque
from typing import NoReturn

from baton.calls.cluster_state import Scaling, ScalingChange
from baton.process.backoff import Backoff
from baton.process.clock import Clock
from baton.process.endless import repeat
from orchestrator.actuation.actuator import Actuator
from orchestrator.actuation.fleet import LiveFleet
from orchestrator.autoscaling.autoscaler import Autoscaler, Decision
from orchestrator.autoscaling.demand import ServiceModel
from orchestrator.observability.metrics import Metrics
from orchestrator.requests.config import AutoscalingConfig

logger = logging.getLogger(__name__)

_NUM_CHANGES = 20
"""Number of recent decisions that are kept for `baton status`. Only decisions that changed groups are kept."""
_MOST_PAUSE_S = 30.0
"""Maximum pause in seconds before the autoscaler runs again after an unexpected error."""


class Scaler:
    """Autoscaling of one cluster. Call `start` once, and `close` at the end."""

    def __init__(
        self, fleet: LiveFleet, actuator: Actuator, metrics: Metrics, clock: Clock, config: AutoscalingConfig
    ) -> None:
        """`fleet` provides the state of the cluster. No decision is made while `fleet` has no model of service
        times."""
        self.state: Scaling | None = None
        """Latest decision, as `baton status` shows it; None before the first decision. The object is replaced as a
        whole."""
        self._fleet = fleet
        self._actuator = actuator
        self._metrics = metrics
        self._clock = clock
        self._config = config
        self._autoscaler: Autoscaler | None = None
        self._service: ServiceModel | None = None
        self._changes: deque[ScalingChange] = deque(maxlen=_NUM_CHANGES)
        self._told = ""
        """Text of the decision that was logged last; empty before a decision has been logged."""
        self._deciding: asyncio.Task[NoReturn] | None = None

    def start(self) -> None:
        """Start to make decisions at regular intervals. Does nothing if autoscaling is off. Must be called once, on the
        asyncio loop."""
        if self._config.mode != "off":
            pauses = Backoff(self._config.interval_s, _MOST_PAUSE_S)
            self._deciding = asyncio.create_task(repeat("the autoscaler", self._turn, pauses))

    async def close(self) -> None:
        """Stop making decisions and stop following changes in progress. Idempotent."""
        if self._deciding is not None:
            self._deciding.cancel()
            await asyncio.gather(self._deciding, return_exceptions=True)
        await self._actuator.close()

    async def _turn(self) -> None:
        await asyncio.sleep(self._config.interval_s)
        self._decide()

    def _decide(self) -> None:
        """Make one decision, and begin to apply it in mode `act`."""
        service = self._fleet.service()
        if service is None:
            return
        acts = self._config.mode == "act"
        if acts:
            self._actuator.resume()
        if self._autoscaler is None or service != self._service:
            self._service = service
            self._autoscaler = Autoscaler(self._config, service, self._actuator.times, self._fleet.window)
        self._autoscaler.times = times = self._actuator.times
        state = self._fleet.state(self._actuator.target(), service, times.cold_start_s)
        decision = self._autoscaler.decide(self._clock.now_s(), state)
        self._tell(decision)
        if acts:
            self._actuator.carry_out(decision.actions)

    def _tell(self, decision: Decision) -> None:
        """Publish the decision, and log it if it differs from the last logged one."""
        mode, chosen = self._config.mode, decision.chosen
        verdict = f"{decision.before} -> {decision.after}: {decision.reason}"
        if decision.actions and (mode == "act" or verdict != self._told):
            self._changes.append(ScalingChange(self._clock.unix_ns(), decision.text))
            for action in decision.actions:
                self._metrics.scaled(action.move.value, action.num_groups)
        if verdict != self._told:
            self._told = verdict
            would = "" if mode == "act" or not decision.actions else "would scale "
            logger.info("autoscaling %s%s", would, decision.text)
        self.state = Scaling(
            mode=mode,
            num_prefill=decision.after.num_prefill,
            num_generate=decision.after.num_generate,
            explanation=decision.text,
            forecast_rate=decision.rate,
            ttft_p95_s=0.0 if chosen is None else chosen.ttft_p95_s,
            itl_p95_s=0.0 if chosen is None else chosen.itl_p95_s,
            changes=tuple(self._changes),
        )
