"""Engines that run a tiny model, but take the time that simulated hardware would take.

Each engine has a simulated device: a timeline to which pieces of work are appended. The engine's thread computes a
piece, and then waits until the device would have finished it. A piece starts on the timeline when the device is idle
and its inputs are available (the job, KV of earlier ranks, a new sequence), even if the thread reaches it later.
Therefore, as on an accelerator, the host's time between two pieces is hidden, unless it is longer than the piece
itself.
"""

import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor

from baton.modeling.forward.attention import Attention
from baton.modeling.forward.decoder import Decoder, LayerTurns, SequenceSpan, Step
from baton.process.clock import Clock, SystemClock
from baton.types import SlotId
from generate_workers.engine.scheduling_policy import Progress, SchedulingPolicy, StepPlan
from prefill_workers.chain import ChainJob
from prefill_workers.config import PrefillConfig
from prefill_workers.engine import PrefillEngine
from prefill_workers.epoch import EpochSession
from prefill_workers.job import Job, KvSender
from tests.support.paced.hardware import LayerTimes, PacedHardware


class Device:
    """Timeline of one device. Only its engine's thread uses it."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._free_s = -math.inf
        self._never = threading.Event()

    def put(self, seconds: float, ready_s: float = -math.inf) -> None:
        """Append work that takes `seconds` and can start at `ready_s` or later."""
        self._free_s = max(self._free_s, ready_s) + seconds

    def wait(self) -> None:
        """Wait until the device has finished all work."""
        if (left_s := self._free_s - self._clock.now_s()) > 0:
            self._never.wait(left_s)


@dataclass
class _Course:
    """Progress of a job on one rank."""

    submitted_s: float
    times: LayerTimes
    num_turns: int = 0

    def next_ready_s(self, job: ChainJob) -> float:
        """Return the time from which its next turn can start: when the job was submitted, or when the layer's KV of
        earlier ranks has arrived."""
        self.num_turns += 1
        return self.submitted_s if self.num_turns == 1 else job.pipeline.arrived_s(self.num_turns - 2)


class PacedRankDecoder(Decoder):
    """Decoder of a prefill rank. Its computations take the job's times on the device."""

    def __init__(self, inner: Decoder, device: Device) -> None:
        super().__init__(inner.config, inner.weights, inner.kernel)
        self.times = LayerTimes(0.0, 0.0, 0.0, 0.0, 0.0)
        """Times of the job whose turn is run."""
        self.ready_s = -math.inf
        """Time from which this turn could start."""
        self._device = device

    def project(self, layer: int, hidden_TD: Tensor, step: Step) -> Tensor:
        self._device.put(self.times.project, self.ready_s)
        q_TNH = super().project(layer, hidden_TD, step)
        self._device.wait()
        return q_TNH

    def attention(self, layer: int, q_TNH: Tensor, first_position: int) -> Attention:
        self._device.put(self.times.last_own if self._is_last(layer) else self.times.own)
        self._device.wait()
        return super().attention(layer, q_TNH, first_position)

    def complete(self, layer: int, hidden_TD: Tensor, attended_TNH: Tensor) -> Tensor:
        self._device.put(self.times.last_far if self._is_last(layer) else self.times.far, self.ready_s)
        hidden_TD = super().complete(layer, hidden_TD, attended_TNH)
        self._device.wait()
        return hidden_TD

    def _is_last(self, layer: int) -> bool:
        return layer == self.config.num_layers - 1


class PacedPrefillEngine(PrefillEngine):
    """Prefill engine that sets the times of each turn's job in the decoder, and the time from which the turn could
    start."""

    def __init__(self, decoder: Decoder, hardware: PacedHardware, config: PrefillConfig) -> None:
        self._pace_clock, self._hardware = SystemClock(), hardware
        self._courses: WeakKeyDictionary[ChainJob, _Course] = WeakKeyDictionary()
        self._paced = PacedRankDecoder(decoder, Device(self._pace_clock))
        super().__init__(self._paced, self._pace_clock, config)

    def _make(self, job: Job, kv_sender: KvSender, incarnation: EpochSession) -> ChainJob:
        made = super()._make(job, kv_sender, incarnation)
        times = self._hardware.layers(job.chunks, job.ranks.index(incarnation.rank))
        self._courses[made] = _Course(self._pace_clock.now_s(), times)
        return made

    def _turn(self, job: ChainJob) -> None:
        course = self._courses[job]
        self._paced.times, self._paced.ready_s = course.times, course.next_ready_s(job)
        super()._turn(job)


class PacedSteps:
    """Device of a generation engine, and the step that its thread runs next."""

    def __init__(self, hardware: PacedHardware) -> None:
        self._hardware = hardware
        self._clock = SystemClock()
        self._device = Device(self._clock)
        self._planned = StepPlan(())
        self._rows: tuple[Progress, ...] = ()
        self._ran: tuple[Progress, ...] = ()
        self._planned_s = 0.0

    def planned(self, plan: StepPlan, rows: Mapping[SlotId, Progress]) -> None:
        """Record the next step. A later plan replaces it if the step has not started."""
        self._planned, self._rows, self._planned_s = plan, tuple(rows.values()), self._clock.now_s()

    def begin(self) -> None:
        """Append the planned step to the timeline. If a sequence of the previous step continues, the step starts
        immediately after the previous one, because the engine had no reason to wait. Otherwise, it starts when it was
        planned."""
        goes_on = any(row is other for row in self._rows for other in self._ran)
        self._device.put(self._seconds(self._planned), -math.inf if goes_on else self._planned_s)
        self._ran = self._rows

    def end(self) -> None:
        self._device.wait()

    def _seconds(self, plan: StepPlan) -> float:
        num_rows, num_tokens = plan.decoding.num_rows, plan.decoding.num_tokens
        step_s = self._hardware.costs.step.plain_s(num_rows, num_tokens / num_rows) if num_rows else 0.0
        prefilled = (span.tokens for span in plan.spans if len(span.tokens) > 1)
        return step_s + sum(self._hardware.chunk_s(tokens) for tokens in prefilled)


class PacedPolicy:
    """Wrapper of a scheduling policy that also reports each plan to the device. Implements SchedulingPolicy."""

    def __init__(self, inner: SchedulingPolicy, steps: PacedSteps) -> None:
        self._inner, self._steps = inner, steps

    def plan(self, rows: Mapping[SlotId, Progress]) -> StepPlan:
        plan = self._inner.plan(rows)
        self._steps.planned(plan, rows)
        return plan

    def took(self, plan: StepPlan, seconds: float) -> None:
        self._inner.took(plan, seconds)


class PacedStepDecoder(Decoder):
    """Decoder of a generation engine. Its forward passes take the step's time on the device."""

    def __init__(self, inner: Decoder, steps: PacedSteps) -> None:
        super().__init__(inner.config, inner.weights, inner.kernel)
        self._steps = steps

    def forward(
        self,
        token_ids: Sequence[int] | Tensor,
        spans: Sequence[SequenceSpan],
        turns: LayerTurns | None = None,
        **options: Any,
    ) -> Tensor:
        self._steps.begin()
        hidden_RD = super().forward(token_ids, spans, turns, **options)
        self._steps.end()
        return hidden_RD
