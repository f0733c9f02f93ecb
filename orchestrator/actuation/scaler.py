"""Runs the autoscaler of a cluster periodically, publishes its decisions, and applies them.

Each decision is explained in the log (if it differs from the previous one), in metrics, and in `baton status`. In mode
`advise`, decisions are not applied. Built by `orchestrator.composition`. On the loop.
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
"""Number of recent decisions that changed groups, kept for `baton status`."""
_MOST_PAUSE_S = 30.0
"""Longest pause in seconds after an unforeseen failure."""


class Scaler:
    """Scales one cluster. Call `start` once and `close` at the end."""

    def __init__(
        self, fleet: LiveFleet, actuator: Actuator, metrics: Metrics, clock: Clock, config: AutoscalingConfig
    ) -> None:
        """No decision is made while `fleet` has no service model."""
        self.state: Scaling | None = None
        """Latest decision, as `baton status` shows it; None before the first. Replaced as a whole."""
        self._fleet = fleet
        self._actuator = actuator
        self._metrics = metrics
        self._clock = clock
        self._config = config
        self._autoscaler: Autoscaler | None = None
        self._service: ServiceModel | None = None
        self._changes: deque[ScalingChange] = deque(maxlen=_NUM_CHANGES)
        self._told = ""
        """Text of the decision that was logged last."""
        self._deciding: asyncio.Task[NoReturn] | None = None

    def start(self) -> None:
        """Start to decide periodically, unless autoscaling is off. Call it once, on the loop."""
        if self._config.mode != "off":
            pauses = Backoff(self._config.interval_s, _MOST_PAUSE_S)
            self._deciding = asyncio.create_task(repeat("the autoscaler", self._turn, pauses))

    async def close(self) -> None:
        """Stop making decisions. Idempotent."""
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
