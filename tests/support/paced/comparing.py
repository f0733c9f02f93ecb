"""One trace, served by a live paced cluster and replayed by the traffic simulator, by the same hardware on paper."""

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
"""Makes the simulator's policy, of the hardware as it was calibrated; the live one is asked for in the plan's
sections."""


@dataclass(frozen=True)
class Comparison:
    """What came of it."""

    hardware: PacedHardware
    """As it was calibrated."""
    simulated: Results
    live: Results
    played: Played

    def values(self, latency: str, percentile: str) -> tuple[float, float]:
        """Live and simulated seconds."""
        summaries = [each.summary(Targets())[latency][percentile] for each in (self.live, self.simulated)]
        return summaries[0], summaries[1]

    def ratio(self, latency: str, percentile: str) -> float:
        """Live over simulated."""
        live_s, simulated_s = self.values(latency, percentile)
        return live_s / simulated_s

    @property
    def late_s(self) -> float:
        """By which the client itself sent requests late, the 95th percentile."""
        sent_s = np.array([fate.sent_s for fate in self.played.fates])
        return float(np.percentile(sent_s - self.played.trace.arrivals_s, 95))


def simulate(trace: Trace, hardware: PacedHardware, plan: PacedPlan, scaler: AnyScaler | None = None) -> Results:
    """As `baton simulate-traffic` does, with the limits of the plan's orchestrator."""
    return Simulation(
        trace,
        hardware.recalling_planner(max_ranks=plan.num_ranks),
        GroupSizes(plan.num_ranks, plan.num_slots, plan.cold_start_s, plan.flip_s),
        plan.start,
        scaler=None if scaler is None else scaler(hardware),
        config=plan.config(Path("none")).orchestrator_config(Path("none")),
    ).run()


async def both_ways(cluster: PacedCluster, trace: Trace, seed: int, scaler: AnyScaler | None = None) -> Comparison:
    """Calibrates the cluster, plays the trace, and simulates it by the same calibration."""
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
    """The same with a cluster of its own, of the model in `folder`."""
    async with paced_cluster(folder, hardware, plan) as cluster:
        return await both_ways(cluster, trace, seed, scaler)
