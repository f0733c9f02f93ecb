"""A live cluster of paced workers scales itself while traffic changes from long prompts to long answers."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from baton.calls.cluster_state import cluster_state_from_proto
from baton_lab.traffic.traces.generators import Lengths, Phase, shifting
from tests.support.paced.cluster import PacedCluster, PacedPlan, paced_cluster
from tests.support.paced.hardware import PacedHardware, write_paced_model
from tests.support.paced.load import Played, calibrate, play
from tests.support.paced.serving import check_served

pytestmark = [pytest.mark.integration, pytest.mark.nightly, pytest.mark.timeout(900)]

COLD_START_S = 3.0
PHASE_S = 36.0
LONG_PROMPTS, LONG_ANSWERS = Lengths(3000, 24), Lengths(100, 96)
TARGETS = {"ttft_p95_s": 4.0, "itl_p95_s": 0.09}
SCALING = {**TARGETS, "mode": "act", "min": 2, "max": 5, "cooldown_s": 8.0, "cold_start_s": COLD_START_S}
NUM_TRIES = 3
"""On a crowded machine groups may start late, or clients be held up, in one of them or another."""
LIMITS = {"max_queued_requests": 10**6, "max_queued_tokens": 10**9, "disaggregation": "always"}


async def test_capacity_follows_traffic_from_prompts_to_answers_and_no_request_is_lost(tmp_path: Path) -> None:
    folder = tmp_path / "paced"
    folder.mkdir()
    write_paced_model(folder)
    plan = PacedPlan((2, 2), cold_start_s=COLD_START_S, orchestrator=LIMITS, sections={"autoscaling": SCALING})
    tried = [await followed(folder, plan)]
    while not tried[-1].is_timely and len(tried) < NUM_TRIES:
        tried.append(await followed(folder, plan))
    assert tried[-1].is_timely, tried


@dataclass
class Followed:
    """How capacity followed the traffic."""

    for_prompts: tuple[int, int]
    """Groups of each role that served near the end of the first phase."""
    for_answers: tuple[int, int]
    """The same of the second."""
    shares_in_time: tuple[float, float]
    """Of each phase's last requests, those whose first token met its target."""

    @property
    def is_timely(self) -> bool:
        turned = self.for_answers[1] >= 3 and self.for_answers[0] < self.for_prompts[0]
        return self.for_prompts[0] >= 3 and turned and min(self.shares_in_time) > 0.9


async def followed(folder: Path, plan: PacedPlan) -> Followed:
    """Plays the trace to a cluster of its own. Nothing is lost, and each change says why."""
    trace = shifting([Phase(PHASE_S, 2.6, LONG_PROMPTS), Phase(PHASE_S, 6.0, LONG_ANSWERS)], seed=5)
    async with paced_cluster(folder, PacedHardware.load(folder), plan) as cluster:
        await calibrate(cluster.channel, cluster.hardware)
        played = await play(cluster.channel, trace, seed=5)
        state = cluster_state_from_proto(await cluster.state())
        await check_served(cluster, played)
    for_prompts, for_answers = ready_at(cluster, played, 0.9 * PHASE_S), ready_at(cluster, played, 1.9 * PHASE_S)
    assert sum(for_prompts) <= 5, cluster.history
    assert state.scaling is not None and state.scaling.changes
    assert all("forecast" in each.explanation and " in " in each.explanation for each in state.scaling.changes)
    in_time = share_in_time(played, 0.6 * PHASE_S, PHASE_S), share_in_time(played, 1.6 * PHASE_S, 2 * PHASE_S)
    return Followed(for_prompts, for_answers, in_time)


def ready_at(cluster: PacedCluster, played: Played, seconds: float) -> tuple[int, int]:
    """Groups of each role that served, so long after the trace's beginning."""
    return [each.num_ready for each in cluster.history if each.since_s <= played.start_s + seconds][-1]


def share_in_time(played: Played, begin_s: float, end_s: float) -> float:
    """Of the requests that came in that time, those whose first token met its target."""
    arrivals_s = played.trace.arrivals_s
    came = np.flatnonzero((arrivals_s >= begin_s) & (arrivals_s < end_s))
    waits_s = np.array([played.fates[each].token_s[0] - arrivals_s[each] for each in came])
    return float((waits_s <= TARGETS["ttft_p95_s"]).mean())
