"""Runs a trace under several scaling policies, all with the same maximum number of groups, and predicts the request
rate that this number of groups can sustain. Does no I/O."""

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
"""Names of the policies that a trace can be run with. `static`: fixed numbers of groups. `autoscale`, `queue`, `load`:
scaling policies. `best-static`: the fixed numbers of groups that serve the trace best."""


@dataclass(frozen=True)
class Setting:
    """Simulated cluster on which policies are compared, with its latency targets and maximum number of groups."""

    planner: RecallingPlanner
    sizes: GroupSizes
    config: AutoscalingConfig
    """Latency targets of the scaling policies, and the maximum number of groups, `config.max`. The policy `best-static`
    always uses this number of groups."""
    start: tuple[int, int]
    """Initial numbers of prefill groups and generation groups."""
    max_blocks: int = 0
    """Number of KV blocks that the prefix cache of each prefill group can hold; 0: no prefix cache."""

    whole_chooser: bool = False
    """True: the orchestrator's own code compares all groups for each request. False: a faster comparison considers only
    a few candidate groups."""

    @property
    def service(self) -> ServiceModel:
        """Return the model with which the autoscaler predicts the durations of prefills and decode steps on a group."""
        return ServiceModel(self.planner, self.sizes.num_ranks, self.sizes.num_slots)

    @property
    def targets(self) -> Targets:
        """Return the latency targets. A request that meets them counts as good."""
        return Targets(self.config.ttft_p95_s, self.config.itl_p95_s)

    def run(self, trace: Trace, policy: str) -> tuple[str, Results]:
        """Simulate a trace under the policy `policy`, which is one of POLICIES. Return a label for the results, and the
        results. The label is the policy's name; for a policy with fixed numbers of groups, it includes these numbers.

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
        """Simulate a trace and return the results. `start`: initial numbers of (prefill, generation) groups. `scaler`:
        scaling policy; None keeps the initial numbers."""
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
        """Create the scaling policy with the given name. Raises InvalidArgumentError for an unknown name."""
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
        """Return all divisions of the maximum number of groups into (prefill groups, generation groups), with at least
        one of each."""
        return [(num_prefill, self.config.max - num_prefill) for num_prefill in range(1, self.config.max)]

    def predicted_rate(self, lengths: Lengths, share: float = 0.95) -> float:
        """Return the highest rate of Poisson traffic, in requests per second, that the maximum number of groups is
        predicted to sustain.

        At this rate, the best division of the groups into prefill and generation groups serves the fraction `share` of
        the requests within the latency targets. `lengths`: mean numbers of prompt and output tokens. Raises
        InvalidArgumentError if no rate meets the targets.
        """
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
