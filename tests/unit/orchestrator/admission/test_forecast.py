"""Waits by hand, and chains as dispatch would place them."""

import random
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

import pytest

from baton.errors import ResourceExhaustedError
from baton.prefix_blocks import PromptBlocks
from baton.sampling_params import SamplingParams
from baton.types import Epoch, JobId, Rank, RequestId
from baton_lab.traffic.choosing import plan_now
from orchestrator.admission.fair_queue import FairQueue
from orchestrator.admission.forecast import ChainForecast, Correction, Turnover, predict_wait_s
from orchestrator.admission.gate import Admission
from orchestrator.membership.members import Membership
from orchestrator.membership.prefill_queues import Pending
from orchestrator.membership.view import ClusterView, GenerationGroup, PrefillGroup
from orchestrator.placement.chooser import Chooser
from orchestrator.requests.config import OrchestratorConfig
from orchestrator.requests.record import Attempt, RequestRecord
from orchestrator.requests.request import Request
from tests.support.clusters.planners import deciding_planner, linear_planner
from tests.support.manual_clock import ManualClock

STATIC = OrchestratorConfig(elastic=False, block_tokens=32)
GROUP = PrefillGroup("chain", ("h:1", "h:2"), Epoch(1), prefix_store="node")


@pytest.mark.parametrize(
    ("num_free", "num_before", "num_needed", "wait_s"),
    [
        (2, 0.0, 1, 0.0),  # a slot is free
        (2, 1.0, 2, 2.5),  # one is missing
        (0, 0.0, 1, 2.5),
        (0, 7.0, 1, 20.0),  # the eighth to be free
        (-2, 0.0, 1, 7.5),  # two of those in use are no more
        (0, 0.5, 1, 3.75),
    ],
)
def test_slots_come_free_one_after_the_other(num_free: int, num_before: float, num_needed: int, wait_s: float) -> None:
    assert predict_wait_s(num_free, num_before, num_needed, 2.5) == pytest.approx(wait_s)
    assert predict_wait_s(num_free, num_before, num_needed, None) == 0.0  # nobody knows how fast


def test_turnover_is_measured_while_somebody_waits() -> None:
    turnover = Turnover()
    turnover.freed(1, 5.0)  # nobody waited
    assert turnover.slot_s is None
    turnover.waited_for(True, 10.0)
    turnover.waited_for(True, 11.0)
    turnover.freed(2, 13.0)
    assert turnover.slot_s == pytest.approx(1.5)
    turnover.waited_for(False, 13.0)
    turnover.freed(1, 90.0)
    turnover.waited_for(True, 100.0)
    turnover.freed(1, 101.0)
    assert turnover.slot_s == pytest.approx((0.95 * 3.0 + 1.0) / (0.95 * 2 + 1))


def test_turnover_follows_a_change_within_some_tens_of_ends() -> None:
    turnover = Turnover()
    turnover.waited_for(True, 0.0)
    for number in range(1, 101):
        turnover.freed(1, float(number))
    assert turnover.slot_s == pytest.approx(1.0)
    for number in range(1, 61):
        turnover.freed(1, 100.0 + 4.0 * number)
    assert turnover.slot_s == pytest.approx(4.0, rel=0.05)


def test_a_correction_follows_what_requests_took() -> None:
    correction = Correction()
    assert correction.factor == 1.0
    correction.observe(0.2, 0.8)
    assert correction.factor == pytest.approx((0.95 + 0.8) / (0.95 + 0.2))
    for _ in range(60):
        correction.observe(0.2, 0.8)
    assert correction.factor == pytest.approx(4.0, rel=0.05)
    for _ in range(60):
        correction.observe(0.5, 0.5)
    assert correction.factor == pytest.approx(1.0, abs=0.1)


def test_one_in_twenty_takes_longer_than_the_cautious_prediction() -> None:
    correction, rng, num_late = Correction(), random.Random(0), 0
    for number in range(2200):
        predicted_s = rng.uniform(0.1, 1.0)
        measured_s = predicted_s * rng.gauss(2.0, 0.4)
        if number >= 200:
            num_late += measured_s > predicted_s * correction.cautious_factor
        correction.observe(predicted_s, measured_s)
    assert 0.03 < num_late / 2000 < 0.08


def test_where_predictions_are_right_caution_costs_nothing() -> None:
    correction = settled()
    assert correction.cautious_factor == pytest.approx(1.0)
    correction.observe(3.0, 0.3)  # a long queue that was gone when its turn came
    assert correction.cautious_factor == correction.factor < 1.0


def test_one_that_hung_does_not_shut_out_the_next() -> None:
    correction = settled()
    correction.observe(0.3, 0.3 * 4)
    late = correction.cautious_factor
    correction = settled()
    correction.observe(0.3, 30.0)
    assert correction.cautious_factor - correction.factor == pytest.approx(late - settled_factor(0.3 * 4))


def settled() -> Correction:
    """After many predictions that were right."""
    correction = Correction()
    for _ in range(100):
        correction.observe(0.3, 0.3)
    return correction


def settled_factor(measured_s: float) -> float:
    correction = settled()
    correction.observe(0.3, measured_s)
    return correction.factor


def request(num_tokens: int, **params: int) -> RequestRecord:
    sampling = SamplingParams(**params)  # type: ignore[arg-type]
    return RequestRecord.of(Request(RequestId("r"), tuple(range(num_tokens)), sampling), 0)


@dataclass
class Cluster:
    """A prefill group and a generation group, with nobody behind them."""

    config: OrchestratorConfig = STATIC
    prefill: tuple[PrefillGroup, ...] = (GROUP,)
    members: Membership = field(default_factory=Membership)
    clock: ManualClock = field(default_factory=lambda: ManualClock(100.0))

    def __post_init__(self) -> None:
        self.members.update(ClusterView(self.prefill, (GenerationGroup("g", "h:9", "layout", 4, 8192),)))
        self.chooser = Chooser(self.members, linear_planner(), self.clock, self.config)

    def chain_s(self, record: RequestRecord) -> float:
        forecast = ChainForecast(self.chooser)
        return forecast.cautious_s(forecast.predict_s(record))

    def book(self, job: Pending) -> None:
        self.members.prefill_queues.add(GROUP.incarnation, JobId(1), job, self.clock.now_s())


def test_a_chain_on_idle_ranks_and_behind_a_job() -> None:
    cluster = Cluster()
    alone_s = cluster.chain_s(request(200))
    assert 0.08 < alone_s <= 0.1  # 200 tokens of 1 ms on two ranks; of the last layer not all is needed
    cluster.book(Pending(due_s=100.0, latest_s=200.0, left_s={Rank(0): 3.0, Rank(1): 2.0}))
    assert cluster.chain_s(request(200)) == pytest.approx(3.0 + alone_s)


def test_a_short_prompt_overtakes_where_the_ranks_serve_elastically() -> None:
    cluster = Cluster(OrchestratorConfig())
    cluster.book(Pending(due_s=103.0, latest_s=200.0, left_s={Rank(0): 3.0, Rank(1): 3.0}))
    assert cluster.chain_s(request(20)) < 0.1


def test_what_is_cached_need_not_be_computed() -> None:
    cluster = Cluster()
    record = request(200)
    blocks = PromptBlocks.of(record.request.prompt_ids, 32, "layout", record.request.prefix_salt)
    cluster.chooser.context.prefixes.use(GROUP.prefix_store, blocks.names)
    assert cluster.chain_s(record) < 0.01  # 8 of 200 tokens are left
    assert cluster.chain_s(replace(record, request=replace(record.request, prefix_salt="another"))) > 0.08


@pytest.mark.parametrize("prefill", [(), (replace(GROUP, ready=False),)])
def test_what_a_generation_group_prefills_counts_as_nothing(prefill: tuple[PrefillGroup, ...]) -> None:
    assert Cluster(prefill=prefill).chain_s(request(200)) == 0.0


def test_the_best_group_that_could_take_it_counts() -> None:
    cluster, record = Cluster(), request(200)
    away = GenerationGroup("away", "h:8", "layout", 4, 8192, ready=False, prefix_store="away")
    full = GenerationGroup("full", "h:7", "other layout", 0, 8192, prefix_store="full")
    cluster.chooser = Chooser(cluster.members, deciding_planner(speed=2.0), ManualClock(100.0), STATIC)
    cluster.members.update(ClusterView((), (away, full, *cluster.members.view.generation)))
    for group in (away, full):
        names = PromptBlocks.of(record.request.prompt_ids, 32, group.layout_fingerprint, "").names
        cluster.chooser.context.prefixes.use(group.prefix_store, names)
    assert cluster.chain_s(record) > 0.08  # nothing is cached at the one group with room
    cluster.members.update(ClusterView((), (away, full)))
    assert 0 < cluster.chain_s(record) < 0.01  # none has room: once it has


def test_a_scored_prompt_takes_no_chain() -> None:
    assert Cluster().chain_s(request(200, prompt_logprobs=1)) == 0.0


def ended(record: RequestRecord, admitted_s: float, first_s: float | None) -> RequestRecord:
    """The request's turn came, and its first token, if it had any."""
    record.admit(ManualClock(admitted_s))
    record.place(ManualClock(admitted_s))
    if first_s is not None:
        record.see_token(first_s)
    return record


def test_predictions_are_corrected_by_what_requests_took() -> None:
    cluster, record = Cluster(), request(200)
    forecast = ChainForecast(cluster.chooser)
    alone_s = forecast.predict_s(record)
    forecast.ended(ended(record, 5.0, 5.0 + 3 * alone_s), alone_s, 9.0)
    assert forecast.cautious_s(forecast.predict_s(request(200))) == pytest.approx(
        factor_after(alone_s, 3 * alone_s) * alone_s, rel=1e-6
    )


def factor_after(predicted_s: float, measured_s: float) -> float:
    correction = Correction()
    correction.observe(predicted_s, measured_s)
    return correction.cautious_factor


@pytest.mark.parametrize("waited", [0.5, 4.0])
def test_a_request_without_a_token_tells_that_it_takes_longer(waited: float) -> None:
    cluster, record = Cluster(), request(200)
    forecast = ChainForecast(cluster.chooser)
    alone_s = forecast.predict_s(record)
    forecast.ended(ended(record, 5.0, None), alone_s, 5.0 + waited * alone_s)
    factor = factor_after(alone_s, waited * alone_s) if waited > 1 else 1.0
    assert forecast.cautious_s(forecast.predict_s(request(200))) == pytest.approx(factor * alone_s, rel=1e-6)


@pytest.mark.parametrize("spoilt", ["retried", "not predicted", "not placed"])
def test_what_tells_nothing_of_a_prediction_is_left_out(spoilt: str) -> None:
    cluster, record = Cluster(), request(200)
    forecast = ChainForecast(cluster.chooser)
    alone_s = made = forecast.predict_s(record)
    ended(record, 5.0, 50.0)
    if spoilt == "retried":
        record.retry()
    elif spoilt == "not placed":
        record.replan()
    else:
        made = 0.0
    forecast.ended(record, made, 60.0)
    assert forecast.cautious_s(forecast.predict_s(request(200))) == pytest.approx(alone_s)


@dataclass
class Served:
    """Requests with deadlines, each behind a job of random length, and what was predicted and decided for them."""

    step_s: float
    """Seconds by which the wall clock steps now and then."""
    cluster: Cluster = field(default_factory=Cluster)
    predicted_s: list[float] = field(default_factory=list)
    refused: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.forecast = ChainForecast(self.cluster.chooser)
        self._rng, self._step_rng = random.Random(5), random.Random(6)
        self._admission = Admission(self.cluster.config, self.cluster.clock, FairQueue())
        self._admission.resize(4)
        self._admission.join(request(1).request)  # one that runs: a request that is alone is never refused
        for number in range(200):
            self._ask(number, request(self._rng.randint(50, 400)))

    def _ask(self, number: int, record: RequestRecord) -> None:
        clock, rng, prefill_queues = self.cluster.clock, self._rng, self.cluster.members.prefill_queues
        clock.advance(rng.uniform(0.0, 0.5))
        busy_s, now_s = rng.uniform(0.0, 0.5), clock.now_s()
        ahead = Pending(now_s, now_s + 9.0, {Rank(0): busy_s, Rank(1): busy_s})
        prefill_queues.add(GROUP.incarnation, JobId(2 * number), ahead, now_s)
        self._maybe_step()
        made = self.forecast.predict_s(record)
        cautious_s = self.forecast.cautious_s(made)
        self.predicted_s.append(cautious_s)
        asked = replace(record.request, deadline_s=clock.now_s() + rng.uniform(0.1, 1.5))
        try:
            self._admission.leave(self._admission.join(asked, cautious_s))
        except ResourceExhaustedError:
            self.refused.append(number)
        record.admit(clock)
        with ExitStack() as held:
            plan = plan_now(self.cluster.chooser, record, held)
            assert plan is not None and plan.chain is not None
            record.place(clock, Attempt(placement=plan.placement))
            prefill_queues.add(GROUP.incarnation, JobId(2 * number + 1), plan.chain.plan.job, clock.now_s())
            self._maybe_step()
            clock.advance(made * rng.uniform(0.5, 2.0))
        record.see_token(clock.now_s())
        for job in (2 * number, 2 * number + 1):
            prefill_queues.release(GROUP.incarnation, JobId(job), (Rank(0), Rank(1)), clock.now_s())
        self.forecast.ended(record, made, clock.now_s())

    def _maybe_step(self) -> None:
        if self._step_rng.random() < 0.2:
            self.cluster.clock.step(self._step_rng.choice((-1, 1)) * self.step_s)


def test_steps_of_the_wall_clock_change_no_prediction_and_refuse_nobody() -> None:
    steady, stepped = Served(0.0), Served(3600.0)
    assert 20 < len(steady.refused) < 180
    assert (stepped.predicted_s, stepped.refused) == (steady.predicted_s, steady.refused)


def test_one_request_counts_as_32_times_slower_at_most() -> None:
    hung, late = settled(), settled()
    hung.observe(0.3, 3600.0)
    late.observe(0.3, 0.3 * 32)
    assert (hung.factor, hung.cautious_factor) == (late.factor, late.cautious_factor)
