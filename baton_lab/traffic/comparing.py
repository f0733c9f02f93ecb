"""Runs one trace under several policies with the same budget of groups, and finds the rate that the budget sustains.
Pure."""

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
"""Policies for a trace: a fixed allocation, three scaling policies, and the best fixed allocation."""


@dataclass(frozen=True)
class Setting:
    """Cluster that policies are compared on."""

    planner: RecallingPlanner
    sizes: GroupSizes
    config: AutoscalingConfig
    """Targets and budget of scaling policies; the best fixed allocation has `max` groups."""
    start: tuple[int, int]
    """Initial numbers of (prefill, generation) groups."""
    max_blocks: int = 0
    """Number of KV blocks of earlier prompts that each prefill group caches; 0: no cache."""

    whole_chooser: bool = False
    """True: the orchestrator's chooser compares all groups. False: only the groups that can be chosen are compared."""

    @property
    def service(self) -> ServiceModel:
        """Return the model of the groups by which the autoscaler predicts."""
        return ServiceModel(self.planner, self.sizes.num_ranks, self.sizes.num_slots)

    @property
    def targets(self) -> Targets:
        """Return the maximum latencies of a good request."""
        return Targets(self.config.ttft_p95_s, self.config.itl_p95_s)

    def run(self, trace: Trace, policy: str) -> tuple[str, Results]:
        """Run a trace under one of POLICIES. Return the name of the policy, including a fixed allocation, and the
        results.

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
        """Return the results of a trace that begins with `start` = (prefill, generation) groups."""
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
        """Return a new scaling policy by name. Raises InvalidArgumentError for an unknown name."""
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
        """Return the highest predicted rate of Poisson traffic, in requests per second, at which the best division of
        the budget serves the fraction `share` of requests within the targets. `lengths`: mean numbers of tokens."""
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
