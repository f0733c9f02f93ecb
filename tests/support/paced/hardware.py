"""Simulated hardware: the durations of a prompt's chunk and of a generation step by the product's cost model.

Workers of a paced cluster wait until these durations have passed. The orchestrator and the traffic simulator predict by
the same two files. The model is tiny: its tokens and KV are real but cheap to compute, and only the durations are those
of a large model.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import numpy as np

from baton.modeling.checkpoints.weights import load_config
from baton.planning import calibration, step_times
from baton.planning.calibration import Calibration, Points, measured_link
from baton.planning.chain.wavefront import rank_seconds, work_of
from baton.planning.cost_model import BATON, CostModel, Kernel, LinkModel
from baton.planning.device_profile import DeviceProfile
from baton.planning.hardware import Hardware
from baton.planning.planner import ChainPlanner
from baton.planning.step_times import StepTimes
from baton.planning.work_cost import WorkCost
from baton.types import TokenRange
from baton_lab.traffic.service import RecallingPlanner
from generate_workers.engine.model_shape import model_shape
from tests.support.models.letter_models import LetterShape, write_letter_model

SHAPE = LetterShape(num_layers=6, hidden=16, inner=16, num_heads=1, num_kv_heads=1, max_tokens=32_768)
"""Shape of the tiny model. A prompt of 6,000 tokens takes 0.1 s of one core."""
PROMPT_TOKEN_S, PAIR_S = 2.7e-4, 2.2e-8
"""Time in seconds per prompt token and per query-key pair, for all layers together. 6,000 tokens take 1.9 s, 1,500 take
0.40 s and 200 take 52 ms."""
STEP = WorkCost(step_s=0.04, token_s=1e-3, key_s=3e-7, pair_s=3e-8)
"""Cost of a generation step. A step of one sequence of 200 tokens takes 41 ms; a step of 16 sequences of 500 tokens
takes 58 ms."""
LOOPBACK_LINK = LinkModel(2e-4, 1e9)
_FILES = ("paced-prefill.json", "paced-steps.json")


@dataclass(frozen=True)
class LayerTimes:
    """Durations in seconds of the phases of a layer on one rank."""

    project: float
    """Projection, after which the chunk's KV can be sent."""
    own: float
    """Attention to the chunk's own tokens."""
    far: float
    """Attention to earlier tokens, and the rest of the layer."""
    last_own: float
    """Attention to the chunk's own tokens in the last layer of the last rank, where only one token is computed."""
    last_far: float


@dataclass(frozen=True)
class PacedHardware:
    """Durations of prefill and generation steps on the simulated hardware."""

    prefill: Calibration
    steps: StepTimes

    @classmethod
    def of(cls, folder: Path, cost: CostModel | None = None, step: WorkCost = STEP) -> Self:
        """Return hardware that takes the given costs for the tiny model in `folder`."""
        shape = model_shape(load_config(folder), dtype_bytes=4)
        cost = cost or CostModel(
            num_layers=shape.num_layers,
            linear_s=PROMPT_TOKEN_S / shape.num_layers,
            pair_s=PAIR_S / shape.num_layers,
            kv_bytes=shape.kv_bytes,
            project_share=shape.project_share,
            link=LOOPBACK_LINK,
        )
        assert not (cost.head_s or cost.issue_s or cost.copy_s or cost.push), "these are not paced"
        # a point makes the costs count as measured: durations of jobs do not change the predictions
        whole_s = cost.num_layers * (cost.linear_s + cost.pair_s / 2)
        names = folder.name, "paced"
        made = Calibration(*names, Kernel.CAUSAL, shape, ((1.0, whole_s),), (), cost)
        return cls(made, StepTimes(*names, shape, step))

    def save(self, folder: Path) -> None:
        """Save the costs to the model's folder, where the workers read them."""
        calibration.save(self.prefill, folder / _FILES[0])
        step_times.save(self.steps, folder / _FILES[1])

    @classmethod
    def load(cls, folder: Path) -> Self:
        return cls(calibration.load(folder / _FILES[0]), step_times.load(folder / _FILES[1]))

    def slower(self, factor: float) -> Self:
        """Return hardware that takes `factor` times as long for prefills."""
        return replace(self, prefill=replace(self.prefill, cost=self.prefill.cost.times(factor)))

    def profile(self, name: str) -> DeviceProfile:
        """Return the profile of a device with these costs of prefill, by which workers are told apart."""
        cost, shape = self.prefill.cost, self.prefill.shape
        linear, pair = shape.linear_flops / cost.linear_s, shape.pair_flops / cost.pair_s
        bandwidth = shape.step_weights * shape.dtype_bytes / self.steps.cost.step_s
        return DeviceProfile(name, "cpu", Hardware(linear, pair, cost.link, memory_bandwidth=bandwidth), bandwidth)

    def planner(self, *, max_ranks: int, max_tokens: int = 8192) -> ChainPlanner:
        """Return a planner with the orchestrator's predictions."""
        return ChainPlanner(self.prefill, max_ranks=max_ranks, max_tokens=max_tokens, steps=self.steps)

    def recalling_planner(self, *, max_ranks: int, max_tokens: int = 8192) -> RecallingPlanner:
        """Return a planner with the traffic simulator's predictions."""
        return RecallingPlanner(self.prefill, max_ranks=max_ranks, max_tokens=max_tokens, steps=self.steps)

    def layers(self, chunks: Sequence[TokenRange], place: int) -> LayerTimes:
        """Return the times that the rank at index `place` of the chain takes for each layer."""
        work = work_of(_lengths(chunks), self.prefill.cost, BATON, chunks[0].start)
        parts = (work.project, work.own, work.far, work.last_own, work.last_far)
        return LayerTimes(*(float(each[0, place]) for each in parts))

    def chunk_s(self, tokens: TokenRange) -> float:
        """Return the time in seconds that one rank takes for `tokens`, given the KV of all earlier tokens."""
        cost = self.prefill.cost
        work = work_of(_lengths([tokens]), cost, BATON, tokens.start)
        return float(rank_seconds(work, np.array([True]), cost, BATON)[0, 0])

    def measured(self, request_s: float, link_points: Points = ()) -> Self:
        """Return this hardware with measured overheads that are not paced, as `baton calibrate` records them: the time
        per request outside its chain (gRPC, the orchestrator), and (bytes, seconds) of messages between ranks."""
        given = self.prefill
        link = measured_link(link_points, given.cost.link) if link_points else given.cost.link
        cost = replace(given.cost, head_s=request_s, link=link)
        return replace(self, prefill=replace(given, cost=cost, link_points=link_points))


def write_paced_model(folder: Path) -> PacedHardware:
    """Write the tiny model and its hardware to a folder, and return the hardware."""
    write_letter_model(folder, shape=SHAPE)
    hardware = PacedHardware.of(folder)
    hardware.save(folder)
    return hardware


def _lengths(chunks: Sequence[TokenRange]) -> "np.ndarray[tuple[int, int], np.dtype[np.float64]]":
    return np.array([[len(chunk) for chunk in chunks]], dtype=np.float64)
