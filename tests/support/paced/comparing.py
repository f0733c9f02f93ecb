"""Comparison of a live paced cluster with the traffic simulator, for the same trace and simulated hardware."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from baton_lab.traffic.results import Results, Targets
from baton_lab.traffic.service import GroupSizes
from baton_lab.traffic.simulation import Scaler, Simulation
from baton_lab.traffic.traces.trace import Trace
from tests.support.paced.cluster import PacedCluster, PacedPlan, paced_cluster
from tests.support.paced.hardware import PacedHardware
from tests.support.paced.load import Played, calibrate, play

PERCENTILES = ("p50", "p95")
LATENCIES = ("ttft_s", "itl_s")
AnyScaler = Callable[[PacedHardware], Scaler]
"""Function that creates the simulator's scaling policy for the calibrated hardware. The live cluster's policy is set in
the plan's sections."""


@dataclass(frozen=True)
class Comparison:
    """Results of a comparison."""

    hardware: PacedHardware
    """Hardware with the calibrated overheads."""
    simulated: Results
    live: Results
    played: Played

    def values(self, latency: str, percentile: str) -> tuple[float, float]:
        """Return (live, simulated) seconds of a latency's percentile."""
        summaries = [each.summary(Targets())[latency][percentile] for each in (self.live, self.simulated)]
        return summaries[0], summaries[1]

    def ratio(self, latency: str, percentile: str) -> float:
        """Return the ratio of the live to the simulated value."""
        live_s, simulated_s = self.values(latency, percentile)
        return live_s / simulated_s

    @property
    def late_s(self) -> float:
        """Return the 95th percentile of the delays in seconds with which the client itself sent requests."""
        sent_s = np.array([fate.sent_s for fate in self.played.fates])
        return float(np.percentile(sent_s - self.played.trace.arrivals_s, 95))


def simulate(trace: Trace, hardware: PacedHardware, plan: PacedPlan, scaler: AnyScaler | None = None) -> Results:
    """Simulate the trace as `baton simulate-traffic` does, with the limits of the plan's orchestrator."""
    return Simulation(
        trace,
        hardware.recalling_planner(max_ranks=plan.num_ranks),
        GroupSizes(plan.num_ranks, plan.num_slots, plan.cold_start_s, plan.flip_s),
        plan.start,
        scaler=None if scaler is None else scaler(hardware),
        config=plan.config(Path("none")).orchestrator_config(Path("none")),
    ).run()


async def both_ways(cluster: PacedCluster, trace: Trace, seed: int, scaler: AnyScaler | None = None) -> Comparison:
    """Calibrate the cluster, play the trace against it, and simulate the trace with the same calibration."""
    hardware = await calibrate(cluster.channel, cluster.hardware)
    played = await play(cluster.channel, trace, seed)
    end_s = played.start_s + max(fate.token_s[-1] for fate in played.fates if fate.token_s)
    live = played.results(cluster.group_s(played.start_s, end_s))
    return Comparison(hardware, simulate(trace, hardware, cluster.plan, scaler), live, played)


async def compare(
    folder: Path,
    hardware: PacedHardware,
    plan: PacedPlan,
    trace: Trace,
    *,
    seed: int = 0,
    scaler: AnyScaler | None = None,
) -> Comparison:
    """Start a cluster that serves the model in `folder`, play the trace against it, and simulate the trace."""
    async with paced_cluster(folder, hardware, plan) as cluster:
        return await both_ways(cluster, trace, seed, scaler)
