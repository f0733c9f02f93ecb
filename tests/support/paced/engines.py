"""Engines that do their real work with a tiny model and take the time that the hardware on paper takes.

Each engine has a device: a line of time on which work is put, piece after piece. The engine's thread does a piece for
real, then waits until the device would be done with it. A piece begins when the device is free and what it needs is
there (the job, earlier ranks' KV, a new row), whenever the thread came to it. So, as on an accelerator, what the host
takes between two pieces is hidden, unless it takes longer than the piece itself.
"""

import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from torch import Tensor

from baton.modeling.forward.attention import Attention
from baton.modeling.forward.decoder import Decoder, LayerTurns, SequenceSpan, Step
from baton.modeling.forward.selection import StepPicks
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
    """One device's line of time. Used by its engine's thread alone."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._free_s = -math.inf
        self._never = threading.Event()

    def put(self, seconds: float, ready_s: float = -math.inf) -> None:
        """Work that can begin at `ready_s`."""
        self._free_s = max(self._free_s, ready_s) + seconds

    def wait(self) -> None:
        """Until the device is done with all work."""
        if (left_s := self._free_s - self._clock.now_s()) > 0:
            self._never.wait(left_s)


@dataclass
class _Course:
    """How far a rank's part of a job has come."""

    submitted_s: float
    times: LayerTimes
    num_turns: int = 0

    def next_ready_s(self, job: ChainJob) -> float:
        """When its next turn could begin: the job had come, or the earlier ranks' rows of the layer."""
        self.num_turns += 1
        return self.submitted_s if self.num_turns == 1 else job.pipeline.arrived_s(self.num_turns - 2)


class PacedRankDecoder(Decoder):
    """A prefill rank's decoder, which takes its job's times on the device."""

    def __init__(self, inner: Decoder, device: Device) -> None:
        super().__init__(inner.config, inner.weights, inner.kernel)
        self.times = LayerTimes(0.0, 0.0, 0.0, 0.0, 0.0)
        """Of the job whose turn it is."""
        self.ready_s = -math.inf
        """When this turn could begin."""
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
    """Tells the decoder whose turn it is, and since when it could be."""

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
    """One generation engine's device, and the step that its thread is about to run."""

    def __init__(self, hardware: PacedHardware) -> None:
        self._hardware = hardware
        self._clock = SystemClock()
        self._device = Device(self._clock)
        self._planned = StepPlan(())
        self._rows: tuple[Progress, ...] = ()
        self._ran: tuple[Progress, ...] = ()
        self._planned_s = 0.0

    def planned(self, plan: StepPlan, rows: Mapping[SlotId, Progress]) -> None:
        """The next step, unless another plan comes before it runs."""
        self._planned, self._rows, self._planned_s = plan, tuple(rows.values()), self._clock.now_s()

    def begin(self) -> None:
        """A step follows the one before at once if a row goes on: the engine had no reason to wait in between."""
        goes_on = any(row is other for row in self._rows for other in self._ran)
        self._device.put(self._seconds(self._planned), -math.inf if goes_on else self._planned_s)
        self._ran = self._rows

    def end(self) -> None:
        self._device.wait()

    def _seconds(self, plan: StepPlan) -> float:
        num_rows, num_tokens = plan.decoding.num_rows, plan.decoding.num_tokens
        step_s = self._hardware.steps.step_s(num_rows, num_tokens / num_rows) if num_rows else 0.0
        prefilled = (span.tokens for span in plan.spans if len(span.tokens) > 1)
        return step_s + sum(self._hardware.chunk_s(tokens) for tokens in prefilled)


class PacedBatcher:
    """Implements Batcher over another, whose plans the device is told of."""

    def __init__(self, inner: SchedulingPolicy, steps: PacedSteps) -> None:
        self._inner, self._steps = inner, steps

    def plan(self, rows: Mapping[SlotId, Progress]) -> StepPlan:
        plan = self._inner.plan(rows)
        self._steps.planned(plan, rows)
        return plan

    def took(self, plan: StepPlan, seconds: float) -> None:
        self._inner.took(plan, seconds)


class PacedStepDecoder(Decoder):
    """A generation engine's decoder, whose forwards take the step's time on the device."""

    def __init__(self, inner: Decoder, steps: PacedSteps) -> None:
        super().__init__(inner.config, inner.weights, inner.kernel)
        self._steps = steps

    def forward(
        self,
        token_ids: Sequence[int],
        spans: Sequence[SequenceSpan],
        turns: LayerTurns | None = None,
        *,
        most_queries: int = 1,
        picks: StepPicks | None = None,
    ) -> Tensor:
        self._steps.begin()
        hidden_TD = super().forward(token_ids, spans, turns, most_queries=most_queries, picks=picks)
        self._steps.end()
        return hidden_TD
