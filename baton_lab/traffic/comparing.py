"""Runs one trace under several policies with the same budget of groups, and finds the rate that it carries. Pure."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from baton.errors import InvalidArgumentError
from baton_lab.traffic.policies import AutoscalePolicy, LoadPolicy, QueuePolicy
from baton_lab.traffic.results import Results, Targets
from baton_lab.traffic.service import GroupSizes, RecallingPlanner
from baton_lab.traffic.simulation import Scaler, Simulation
from baton_lab.traffic.traces.generators import Lengths
from baton_lab.traffic.traces.trace import Trace
from orchestrator.autoscaling.actions import LeadTimes
from orchestrator.autoscaling.allocation import most_good
from orchestrator.autoscaling.demand import ServiceModel
from orchestrator.autoscaling.prediction import Predictor
from orchestrator.autoscaling.traffic import TrafficClass, TrafficForecast
from orchestrator.requests.config import AutoscalingConfig

POLICIES = ("static", "autoscale", "queue", "load", "best-static")
"""Policies that a trace can be run under: a fixed allocation, three that scale, and the best of all fixed ones."""


@dataclass(frozen=True)
class Setting:
    """The cluster that policies are compared on."""

    planner: RecallingPlanner
    sizes: GroupSizes
    config: AutoscalingConfig
    """Targets and budget of scaling policies; the best fixed allocation has `max` groups."""
    start: tuple[int, int]
    """Prefill and generation groups at the beginning."""
    max_blocks: int = 0
    """Blocks of earlier prompts' KV that each prefill group keeps; 0: none."""

    whole_chooser: bool = False
    """True: the orchestrator's chooser compares all groups, not only those that can win."""

    @property
    def service(self) -> ServiceModel:
        """Return the model of the groups that the autoscaler predicts by."""
        return ServiceModel(self.planner, self.sizes.num_ranks, self.sizes.num_slots)

    @property
    def targets(self) -> Targets:
        """Return the latencies below which a request counts as good."""
        return Targets(self.config.ttft_p95_s, self.config.itl_p95_s)

    def run(self, trace: Trace, policy: str) -> tuple[str, Results]:
        """Run a trace under one of POLICIES; return the policy's name, with the allocation if it is fixed, and results.

        Raises InvalidArgumentError for an unknown policy.
        """
        if policy == "best-static":
            results = {split: self.replay(trace, split) for split in self.splits()}
            best = max(results, key=lambda split: results[split].goodput(self.targets))
            return f"best-static {best[0]}:{best[1]}", results[best]
        if policy == "static":
            return f"static {self.start[0]}:{self.start[1]}", self.replay(trace, self.start)
        return policy, self.replay(trace, self.start, self.scaler(policy))

    def replay(self, trace: Trace, start: tuple[int, int], scaler: Scaler | None = None) -> Results:
        """Return the results of a trace that begins with `start` groups."""
        return Simulation(
            trace,
            self.planner,
            self.sizes,
            start,
            scaler=scaler,
            max_blocks=self.max_blocks,
            whole_chooser=self.whole_chooser,
        ).run()

    def scaler(self, policy: str) -> Scaler:
        """Return a new scaling policy of that name. Raises InvalidArgumentError for an unknown one."""
        made: dict[str, Callable[[], Scaler]] = {
            "autoscale": lambda: AutoscalePolicy(
                self.config, self.service, LeadTimes(self.sizes.cold_start_s, self.sizes.flip_s)
            ),
            "queue": lambda: QueuePolicy(self.config),
            "load": lambda: LoadPolicy(self.config, self.service),
        }
        if policy not in made:
            raise InvalidArgumentError(f"--policy: {policy!r} is unknown: use some of {', '.join(POLICIES)}")
        return made[policy]()

    def splits(self) -> Iterable[tuple[int, int]]:
        """Return all divisions of the budget into groups of both roles."""
        return [(num_prefill, self.config.max - num_prefill) for num_prefill in range(1, self.config.max)]

    def predicted_rate(self, lengths: Lengths, share: float = 0.95) -> float:
        """Return the highest rate of Poisson traffic with these mean lengths of which the best division of the budget
        is predicted to serve a `share` within the targets."""
        generator = np.random.default_rng(0)
        drawn = [
            tuple(np.maximum(generator.gamma(4, mean / 4, 64), 1).astype(int).tolist())
            for mean in (lengths.prompt, lengths.output)
        ]
        low, high = 0.0, 1.0
        while self._share(drawn, high) >= share:
            low, high = high, 2 * high
        for _ in range(20):
            middle = (low + high) / 2
            low, high = (middle, high) if self._share(drawn, middle) >= share else (low, middle)
        if not low:
            raise InvalidArgumentError("no rate meets the targets: allow longer latencies, or use faster hardware")
        return low

    def _share(self, drawn: list[tuple[int, ...]], rate: float) -> float:
        traffic = TrafficForecast((TrafficClass(rate, drawn[0], drawn[1]),))
        return most_good(Predictor(self.service, traffic, self.config), self.config).good_share
