"""Simulated hardware: the durations of a prompt's chunk and of a generation step by the product's cost model.

Workers of a paced cluster wait until these durations have passed. The orchestrator and the traffic simulator predict by
the same file. The model is tiny: its tokens and KV are real but cheap to compute, and only the durations are those
of a large model.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Self

import numpy as np
from pydantic import TypeAdapter

from baton.modeling.checkpoints.weights import load_config
from baton.planning.chain.wavefront import rank_seconds, work_of
from baton.planning.cost_model import BATON, CostModel, LinkModel
from baton.planning.device_profile import DeviceProfile
from baton.planning.hardware import Hardware, ModelCosts
from baton.planning.planner import ChainPlanner
from baton.planning.work_cost import WorkCost
from baton.types import TokenRange
from baton_lab.study.prefill_fit import Points, measured_link
from baton_lab.traffic.service import RecallingPlanner
from generate_workers.engine.model_shape import model_shape
from tests.support.clusters.planners import times
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
_FILE = "paced.json"


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

    costs: ModelCosts

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
        return cls(ModelCosts(shape, cost, step, shape.dtype_bytes))

    def save(self, folder: Path) -> None:
        """Save the costs to the model's folder, where the workers read them."""
        (folder / _FILE).write_text(json.dumps(asdict(self.costs)))

    @classmethod
    def load(cls, folder: Path) -> Self:
        return cls(TypeAdapter(ModelCosts).validate_json((folder / _FILE).read_text()))

    def slower(self, factor: float) -> Self:
        """Return hardware that takes `factor` times as long for prefills."""
        return replace(self, costs=replace(self.costs, prefill=times(self.costs.prefill, factor)))

    def profile(self, name: str) -> DeviceProfile:
        """Return the profile of a device with these costs of prefill, by which workers are told apart."""
        cost, shape = self.costs.prefill, self.costs.shape
        linear, pair = shape.linear_flops / cost.linear_s, shape.pair_flops / cost.pair_s
        bandwidth = shape.step_weights * shape.dtype_bytes / self.costs.step.step_s
        return DeviceProfile(name, "cpu", Hardware(linear, pair, cost.link, memory_bandwidth=bandwidth), bandwidth)

    def planner(self, *, max_ranks: int, max_tokens: int = 8192) -> ChainPlanner:
        """Return a planner with the orchestrator's predictions."""
        return ChainPlanner(self.costs, max_ranks=max_ranks, max_tokens=max_tokens)

    def recalling_planner(self, *, max_ranks: int, max_tokens: int = 8192) -> RecallingPlanner:
        """Return a planner with the traffic simulator's predictions."""
        return RecallingPlanner(self.costs, max_ranks=max_ranks, max_tokens=max_tokens)

    def layers(self, chunks: Sequence[TokenRange], place: int) -> LayerTimes:
        """Return the times that the rank at index `place` of the chain takes for each layer."""
        work = work_of(_lengths(chunks), self.costs.prefill, BATON, chunks[0].start)
        parts = (work.project, work.own, work.far, work.last_own, work.last_far)
        return LayerTimes(*(float(each[0, place]) for each in parts))

    def chunk_s(self, tokens: TokenRange) -> float:
        """Return the time in seconds that one rank takes for `tokens`, given the KV of all earlier tokens."""
        cost = self.costs.prefill
        work = work_of(_lengths([tokens]), cost, BATON, tokens.start)
        return float(rank_seconds(work, np.array([True]), cost, BATON)[0, 0])

    def measured(self, request_s: float, link_points: Points = ()) -> Self:
        """Return this hardware with measured overheads that are not paced: the time per
        request outside its chain (gRPC, the orchestrator), and (bytes, seconds) of messages between ranks."""
        given = self.costs.prefill
        link = measured_link(link_points, given.link) if link_points else given.link
        return replace(self, costs=replace(self.costs, prefill=replace(given, head_s=request_s, link=link)))


def write_paced_model(folder: Path) -> PacedHardware:
    """Write the tiny model and its hardware to a folder, and return the hardware."""
    write_letter_model(folder, shape=SHAPE)
    hardware = PacedHardware.of(folder)
    hardware.save(folder)
    return hardware


def _lengths(chunks: Sequence[TokenRange]) -> "np.ndarray[tuple[int, int], np.dtype[np.float64]]":
    return np.array([[len(chunk) for chunk in chunks]], dtype=np.float64)
