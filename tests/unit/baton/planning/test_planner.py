"""One place answers for all predictions: near the search, equal to the wavefront, and for any prompt."""

import dataclasses
import functools
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from baton.errors import InvalidArgumentError
from baton.planning.chain.search import search
from baton.planning.chain.wavefront import chain_ttft
from baton.planning.cost_model import BATON, CostModel, LinkModel, Protocol
from baton.planning.device_profile import nominal_core
from baton.planning.hardware import ModelCosts, cpu_rank
from baton.planning.local_prefill import LocalPrefill
from baton.planning.planner import ChainPlanner
from baton.planning.work_cost import WorkCost
from baton.results.prefill_trace import RankTiming
from baton.types import TokenRange
from baton_lab.study.known_hardware import HARDWARE
from baton_lab.study.known_models import SHAPES
from tests.support.clusters.planners import deciding_planner, planner_of
from tests.support.wavefront import reference

SHAPE = SHAPES["smollm2-135m"]
ASSUMED = ModelCosts.of(SHAPE, cpu_rank(1, SHAPE.dtype_bytes))
BETWEEN_KNOTS = (24, 90, 300, 1400, 6000)
SLOW = CostModel(num_layers=10, linear_s=1e-3, pair_s=0.0, kv_bytes=100, link=LinkModel(0.5, 1e3))
"""On a link that carries a token a second."""


@functools.cache
def assumed_planner() -> ChainPlanner:
    return ChainPlanner(ASSUMED, max_ranks=4, max_tokens=8192)


def over(link: LinkModel) -> ModelCosts:
    return dataclasses.replace(ASSUMED, prefill=dataclasses.replace(ASSUMED.prefill, link=link))


def lengths(chunks: tuple[TokenRange, ...]) -> tuple[int, ...]:
    return tuple(len(chunk) for chunk in chunks)


def behind(cached: int, num_tokens: int) -> TokenRange:
    return TokenRange(cached, cached + num_tokens)


@given(cached=st.integers(0, 5000), num_tokens=st.integers(1, 10_000), num_ranks=st.integers(1, 4))
def test_any_prompt_is_covered_in_order(cached: int, num_tokens: int, num_ranks: int) -> None:
    chunks = assumed_planner().chunks(behind(cached, num_tokens), num_ranks)
    assert len(chunks) == min(num_ranks, num_tokens) and all(len(chunk) for chunk in chunks)
    assert (chunks[0].start, chunks[-1].end) == (cached, cached + num_tokens)
    assert all(left.end == right.start for left, right in itertools.pairwise(chunks))


@pytest.mark.parametrize("num_tokens", BETWEEN_KNOTS)
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_chunks_are_within_three_percent_of_the_search(num_tokens: int, num_ranks: int) -> None:
    planned = assumed_planner().ttft_s(assumed_planner().chunks(behind(0, num_tokens), num_ranks))
    searched = chain_ttft(search(num_tokens, num_ranks, ASSUMED.prefill, BATON), ASSUMED.prefill, BATON)
    assert planned <= 1.03 * float(searched)


@pytest.mark.parametrize(
    ("link", "found"),
    [
        (LinkModel(15e-6, 50e9), {300: (0.0034919, 0.0014469), 8192: (0.10765, 0.041363), 131_072: (5.1351, 1.9485)}),
        (LinkModel(1e-4, 5e7), {300: (0.010579, 0.030523), 8192: (0.32131, 0.32169), 131_072: (15.276, 15.277)}),
    ],
    ids=["fast link", "slow link"],
)
def test_few_partitions_are_enough_for_the_best_chains(
    monkeypatch: pytest.MonkeyPatch, link: LinkModel, found: dict[int, tuple[float, float]]
) -> None:
    """The times of 3 and 8 ranks are those of a search from all seeds, which computes up to 246,000 partitions."""
    num_partitions = 0

    def counted(
        chunks: NDArray[np.float64], cost: CostModel, protocol: Protocol, *, cached: int
    ) -> NDArray[np.float64]:
        nonlocal num_partitions
        num_partitions += len(chunks)
        return chain_ttft(chunks, cost, protocol, cached=cached)

    monkeypatch.setattr("baton.planning.chain.search.chain_ttft", counted)
    rank = dataclasses.replace(HARDWARE["h100-flash"], link=link)
    planner = ChainPlanner(ModelCosts.of(SHAPES["llama-3.1-8b"], rank), max_ranks=8, max_tokens=131_072)
    assert 0 < num_partitions < 50_000
    for num_tokens, times in found.items():
        planned = [planner.ttft_s(planner.chunks(behind(0, num_tokens), num_ranks)) for num_ranks in (3, 8)]
        assert planned == pytest.approx(times, rel=0.005)


@pytest.mark.parametrize("cached", [100, 2000, 30_000])
@pytest.mark.parametrize("num_tokens", [300, 3000])
@pytest.mark.parametrize("link", [ASSUMED.prefill.link, LinkModel(1e-3, 1e8)], ids=["loopback", "slow"])
def test_behind_a_cached_prefix_too(cached: int, num_tokens: int, link: LinkModel) -> None:
    planner = ChainPlanner(over(link), max_ranks=3, max_tokens=4096)
    planned = planner.ttft_s(planner.chunks(behind(cached, num_tokens), 3))
    searched = chain_ttft(search(num_tokens, 3, planner.cost, BATON, cached=cached), planner.cost, BATON, cached=cached)
    assert planned <= 1.05 * float(searched)


def test_when_links_rule_the_last_rank_gets_most_also_behind_a_prefix_and_beyond_the_knots() -> None:
    planner = ChainPlanner(over(LinkModel(1e-3, 1e6)), max_ranks=10, max_tokens=256)
    for cached, num_ranks in ((0, 2), (500, 2), (0, 10), (500, 10)):
        chunks = lengths(planner.chunks(behind(cached, 256), num_ranks))
        assert chunks[-1] > 0.6 * 256, (cached, chunks)


@given(cached=st.integers(0, 3000), chunks=st.lists(st.integers(1, 2000), min_size=1, max_size=4))
def test_predictions_are_the_wavefronts(cached: int, chunks: list[int]) -> None:
    edges = list(itertools.accumulate(chunks, initial=cached))
    ranges = [TokenRange(*edge) for edge in itertools.pairwise(edges)]
    ttft_s = assumed_planner().ttft_s(ranges)
    assert ttft_s == pytest.approx(reference(chunks, ASSUMED.prefill, BATON, cached=cached))
    ranks = assumed_planner().rank_s(ranges)
    assert max(ranks) <= ttft_s * (1 + 1e-9)
    assert assumed_planner().layer_s(ranges) * SHAPE.num_layers >= 0.999 * max(ranks)


def test_a_lone_rank_computes_all_the_time() -> None:
    whole = assumed_planner().chunks(behind(0, 1000), 1)
    assert assumed_planner().rank_s(whole) == pytest.approx((assumed_planner().ttft_s(whole) - ASSUMED.prefill.head_s,))


def test_a_rank_before_the_last_ends_when_its_kv_has_left() -> None:
    cost = CostModel(2, linear_s=4.0, pair_s=0.0, kv_bytes=1, project_share=0.25, fixed_s=1.0)
    planner = ChainPlanner(dataclasses.replace(ASSUMED, prefill=cost), max_ranks=2, max_tokens=64)
    first, last = planner.rank_s((TokenRange(0, 10), TokenRange(10, 20)))
    assert first == (1 + 40) + (1 + 10)
    assert last == (1 + 40) + (1 + 10 + 3)


def test_a_slow_message_counts_as_a_long_layer() -> None:
    planner = ChainPlanner(over(LinkModel(0.5, 1e9)), max_ranks=2, max_tokens=64)
    assert planner.layer_s(planner.chunks(behind(0, 64), 2)) > 0.5
    assert planner.layer_s(planner.chunks(behind(0, 64), 1)) < 0.5


def test_a_planner_begins_with_its_nominal_costs() -> None:
    planner = ChainPlanner(ASSUMED, max_ranks=2, max_tokens=512)
    assert planner.nominal is ASSUMED
    assert planner.cost == ASSUMED.prefill
    assert planner.step_s(3, 500) == ASSUMED.step.plain_s(3, 500)
    slow = ChainPlanner(over(LinkModel(1e-3, 1e6)), max_ranks=2, max_tokens=512)
    tokens = behind(0, 512)
    chunks, slow_chunks = planner.chunks(tokens, 2), slow.chunks(tokens, 2)
    assert slow_chunks[0].end < chunks[0].end
    assert slow.ttft_s(slow_chunks) > planner.ttft_s(chunks)


@pytest.mark.parametrize(("max_ranks", "max_tokens", "name"), [(0, 10, "max_ranks"), (1, 0, "max_tokens")])
def test_refuses_what_it_cannot_plan_for(max_ranks: int, max_tokens: int, name: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"{name} = 0 is out of range: use at least 1"):
        ChainPlanner(ASSUMED, max_ranks=max_ranks, max_tokens=max_tokens)


def test_refuses_no_tokens_and_more_ranks_than_it_has() -> None:
    with pytest.raises(InvalidArgumentError, match="is empty"):
        assumed_planner().chunks(behind(3, 0), 2)
    with pytest.raises(InvalidArgumentError, match="num_ranks = 5 is out of range: this planner has 4"):
        assumed_planner().chunks(behind(0, 100), 5)
    with pytest.raises(InvalidArgumentError, match="chunks is empty"):
        assumed_planner().ttft_s(())


@pytest.mark.parametrize("max_tokens", [1, 2, 15, 16, 17, 33])
def test_plans_for_tiny_models(max_tokens: int) -> None:
    planner = ChainPlanner(ASSUMED, max_ranks=3, max_tokens=max_tokens)
    for num_tokens in range(1, max_tokens + 1):
        assert sum(lengths(planner.chunks(behind(0, num_tokens), 3))) == num_tokens


def done(planner: ChainPlanner, num_tokens: int, slower: float, at_s: float = 1.0) -> tuple[RankTiming, ...]:
    """Reports of a chain of two ranks that are so many times slower than ASSUMED."""
    chunks = planner.chunks(behind(0, num_tokens), 2)
    seconds = assumed_planner().rank_s(chunks)
    start_ns = round(at_s * 1e9)
    return tuple(
        RankTiming(rank, chunk, start_ns, start_ns + round(slower * seconds[rank] * 1e9), 0.0, 0, 0, 0, 0, ())
        for rank, chunk in enumerate(chunks)
    )


def test_nominal_costs_are_scaled_by_what_jobs_took_and_chunks_stay() -> None:
    planner = ChainPlanner(over(LinkModel(1e-3, 1e8)), max_ranks=2, max_tokens=2048)
    chunks = [planner.chunks(behind(cached, 1000), 2) for cached in (0, 500)]
    before = [planner.ttft_s(each) for each in chunks], planner.rank_s(chunks[0]), planner.layer_s(chunks[0])
    planner.observe("chain", done(planner, 2800, slower=3.0))
    assert [planner.chunks(behind(cached, 1000), 2) for cached in (0, 500)] == chunks
    after = [planner.ttft_s(each) for each in chunks], planner.rank_s(chunks[0]), planner.layer_s(chunks[0])
    assert after[0] == pytest.approx([3 * each for each in before[0]], rel=0.01)  # the link is as fast as before
    assert after[1] == pytest.approx(tuple(3 * each for each in before[1]), rel=1e-3)
    assert after[2] == pytest.approx(3 * before[2], rel=1e-3)
    planner.observe("chain", done(planner, 2800, slower=3.0, at_s=100.0))
    assert planner.ttft_s(chunks[0]) == pytest.approx(after[0][0])  # nominal costs are compared with, not scaled ones


def test_every_planner_learns_and_its_nominal_costs_and_knots_stay() -> None:
    planner = ChainPlanner(ASSUMED, max_ranks=2, max_tokens=512)
    table, step_s = planner.table, planner.step_s(3, 500)
    planner.observe("chain", ())
    assert planner.cost == ASSUMED.prefill
    planner.observe("chain", done(planner, 2800, slower=2.0))
    assert planner.cost.linear_s == pytest.approx(2 * ASSUMED.prefill.linear_s, rel=1e-3)
    assert planner.cost.link == ASSUMED.prefill.link
    assert (planner.nominal, planner.table, planner.step_s(3, 500)) == (ASSUMED, table, step_s)
    again = ChainPlanner(planner.nominal, max_ranks=2, max_tokens=512, table=planner.table)
    assert again.cost == ASSUMED.prefill  # observations are lost with the planner
    again.observe("chain", done(again, 2800, slower=3.0))
    assert again.cost.linear_s == pytest.approx(3 * ASSUMED.prefill.linear_s, rel=1e-3)


def test_what_a_short_job_took_besides_is_a_part_of_every_job() -> None:
    planner = ChainPlanner(ASSUMED, max_ranks=2, max_tokens=512)
    short, long = (planner.chunks(TokenRange(0, num_tokens), 1) for num_tokens in (40, 2800))
    before = [planner.ttft_s(each) for each in (short, long)]
    for num_tokens, at_s in ((2800, 1.0), (40, 100.0)):
        job = done(planner, num_tokens, slower=1.5, at_s=at_s)
        planner.observe("chain", [dataclasses.replace(rank, end_ns=rank.end_ns + 300_000_000) for rank in job])
    after = [planner.ttft_s(each) for each in (short, long)]
    assert after == pytest.approx([1.5 * each + 0.3 for each in before], rel=0.02)


def pushed(end_ns: int, push_end_ns: int, num_bytes: int) -> RankTiming:
    return RankTiming(0, TokenRange(0, 10), 0, end_ns, 0.0, 0, push_end_ns, num_bytes, 0, ())


def sent(planner: ChainPlanner, link: LinkModel) -> list[RankTiming]:
    """Return timings of a chain of two ranks that compute as the planner assumes, and whose messages take `link`."""
    num_layers, num_bytes = planner.cost.num_layers, 500 * planner.cost.kv_bytes
    chunks = TokenRange(0, 500), TokenRange(500, 1000)
    return [
        RankTiming(
            *(rank, tokens, 1, 1 + round(seconds * 1e9), 0.0, 0, 0, 0),
            num_bytes_sent=num_layers * num_bytes * (rank == 0),
            layers=(),
            num_messages_sent=num_layers * (rank == 0),
            send_s=num_layers * link.seconds(num_bytes) * (rank == 0),
        )
        for rank, (tokens, seconds) in enumerate(zip(chunks, planner.rank_s(chunks), strict=True))
    ]


@pytest.mark.parametrize("width", [2, 4])
def test_partitions_follow_the_link_that_messages_had(width: int) -> None:
    """Llama 7B on ranks of 32 cores. Messages are 16 times as slow as assumed."""
    assumed, prompt = ModelCosts.of(SHAPES["llama-7b"], cpu_rank(32, 2)), behind(0, 1000)
    slow = assumed.prefill.link.times(16)
    true = dataclasses.replace(assumed, prefill=dataclasses.replace(assumed.prefill, link=slow))
    planner, knowing = (ChainPlanner(each, max_ranks=4, max_tokens=4096) for each in (assumed, true))
    knots = planner.chunks(prompt, width)
    planner.observe("chain", sent(planner, assumed.prefill.link))
    assert planner.cost.link == assumed.prefill.link and planner.chunks(prompt, width) == knots
    for _ in range(3):
        planner.observe("chain", sent(planner, slow))
    assert planner.cost.link == slow and planner.nominal == assumed
    assert planner.ttft_s(knots) == pytest.approx(knowing.ttft_s(knots), rel=0.01)
    assert planner.layer_s(knots) == pytest.approx(knowing.layer_s(knots), rel=0.01)  # else it counts as stalled
    taken = knowing.ttft_s(planner.chunks(prompt, width))
    assert taken < 0.8 * knowing.ttft_s(knots)
    assert taken < 1.1 * knowing.ttft_s(knowing.chunks(prompt, width))


def test_kv_that_does_not_fit_beside_the_chain_takes_longer_than_its_last_layer() -> None:
    planner = planner_of(SLOW, max_ranks=1)
    assert planner.transfer_s(10, prefill_s=100.0) == pytest.approx(0.5 + 1.0)  # the last layer's 1,000 bytes
    assert planner.transfer_s(10, prefill_s=2.0) == pytest.approx(0.5 + 8.0)


def test_what_pushes_take_is_scaled_by_what_they_took_after_their_chains() -> None:
    planner = planner_of(SLOW, max_ranks=1)
    planner.observe("group", [pushed(end_ns=100 * 10**9, push_end_ns=103 * 10**9, num_bytes=10_000)])
    assert planner.transfer_s(10, prefill_s=100.0) == pytest.approx(3.0)


def test_a_fetch_takes_its_bytes_and_a_way_there_and_back_between_hosts() -> None:
    planner = planner_of(SLOW, max_ranks=1)
    assert planner.fetch_s(10, is_far=True) - planner.fetch_s(0, is_far=True) == pytest.approx(10.0)
    assert planner.fetch_s(10, is_far=True) - planner.fetch_s(10, is_far=False) == pytest.approx(1.0)
    assert 0 < planner.fetch_s(0, is_far=False) < 0.1


def test_what_fetches_take_is_scaled_by_what_they_took_until_computing_was_faster_many_times() -> None:
    planner = planner_of(SLOW, max_ranks=1)
    nominal_s = planner.fetch_s(10, is_far=True)
    planner.observe_fetch(10_000, 3 * nominal_s, is_far=True)
    assert planner.fetch_s(10, is_far=True) == pytest.approx(3 * nominal_s)
    num_decisions = 0
    while planner.fetch_s(10, is_far=True) > nominal_s:
        planner.pass_over_fetch()
        num_decisions += 1
    assert 10 < num_decisions < 1000


def test_a_generation_group_s_prefill_is_a_rank_s_at_its_speed_between_steps() -> None:
    planner = deciding_planner(speed=2.0)
    alone_s = sum(planner.rank_s((TokenRange(0, 100),)))
    assert planner.local_s(TokenRange(0, 100), 0.0) == pytest.approx((alone_s / 2, 0.0))
    found = planner.local_s(TokenRange(0, 100), planner.step_s(3, 50))
    assert found is not None and found[1] == pytest.approx((0.5 + 5) * 0.02)
    tokens = TokenRange(0, 5000)
    planner.observe_local(tokens, 3 * sum(planner.rank_s((tokens,))) / 2)
    assert planner.local_s(TokenRange(0, 100), 0.0) == pytest.approx((1.5 * alone_s, 0.0), rel=0.02)
    later = planner.local_s(TokenRange(0, 100), planner.step_s(3, 50))
    assert later is not None and later[1] > found[1]  # slower chunks need more steps


def local_planner() -> ChainPlanner:
    """A planner by nominal costs, which jobs correct."""
    return ChainPlanner(ASSUMED, max_ranks=2, max_tokens=512, local=LocalPrefill(1.0, 256))


def test_what_a_local_prefill_took_is_corrected_once() -> None:
    planner, tokens = local_planner(), TokenRange(0, 2800)
    nominal_s = sum(planner.rank_s((tokens,)))
    planner.observe("chain", done(planner, 2800, slower=3.0))
    assert planner.local_s(tokens, 0.0) == pytest.approx((3 * nominal_s, 0.0), rel=0.02)  # nothing else is known yet
    planner.observe_local(tokens, 3 * nominal_s)
    assert planner.local_s(tokens, 0.0) == pytest.approx((3 * nominal_s, 0.0), rel=0.02)
    assert local_planner().local_s(tokens, 0.0) == pytest.approx((nominal_s, 0.0))  # another one has seen nothing


def test_a_local_prefill_that_was_slow_once_is_believed_in_again() -> None:
    planner = local_planner()
    tokens = TokenRange(0, 2000)
    nominal_s = planner.alone_s(tokens)
    assert nominal_s is not None
    planner.observe_local(tokens, 30 * nominal_s)
    num_decisions = 0
    while planner.alone_s(tokens) != nominal_s:
        planner.pass_over_local()
        num_decisions += 1
    assert 10 < num_decisions < 1000


def test_nobody_knows_what_a_generation_group_takes_unless_told() -> None:
    assert assumed_planner().local_s(TokenRange(0, 100), 0.0) is None


def test_a_planner_of_knots_that_were_searched_before_plans_alike() -> None:
    searched = ChainPlanner(ASSUMED, max_ranks=3, max_tokens=512)
    given = ChainPlanner(ASSUMED, max_ranks=3, max_tokens=512, table=searched.table)
    assert given.table is searched.table
    prompt = TokenRange(0, 300)
    assert given.chunks(prompt, 3) == searched.chunks(prompt, 3)


def test_workers_on_another_device_have_a_planner_of_their_own() -> None:
    core = nominal_core(2)
    here, there = dataclasses.replace(core, name="here"), dataclasses.replace(core, name="there")
    planner = ChainPlanner(
        ASSUMED, max_ranks=2, max_tokens=512, local=LocalPrefill(0.5, 256, 0.25), devices=frozenset({"here"})
    )
    assert planner.for_device(here) is planner
    other = planner.for_device(there)
    assert other is planner.for_device(there) is not planner
    assert other.nominal == ModelCosts.of(SHAPE, there.hardware)
    assert other.local == LocalPrefill(1.0, 256, 0.25)  # ranks and engines with the same profile are equally fast
    assert other.step_s(3, 500) == ModelCosts.of(SHAPE, there.hardware).step.plain_s(3, 500)
    faster = dataclasses.replace(there.hardware, linear_flops=2 * there.hardware.linear_flops)
    assert planner.for_device(dataclasses.replace(there, hardware=faster)) is not other  # measured again
    other.observe("chain", done(planner, 2800, slower=3.0))
    assert planner.cost == ASSUMED.prefill != other.cost
    assert other.nominal.prefill.linear_s < other.cost.linear_s
    assert ChainPlanner(ASSUMED, max_ranks=1, max_tokens=64).for_device(there).local is None


def test_weights_have_the_same_size_on_every_device() -> None:
    profile = nominal_core(2)
    costs = ModelCosts.of(SHAPE, cpu_rank(4, 2), bytes_per_weight=1)
    other = ChainPlanner(costs, max_ranks=1, max_tokens=64).for_device(profile)
    assert other.nominal == ModelCosts.of(SHAPE, profile.hardware, bytes_per_weight=1)
    full = ChainPlanner(ASSUMED, max_ranks=1, max_tokens=64).for_device(profile)
    assert (other.nominal.bytes_per_weight, full.nominal.bytes_per_weight) == (1, SHAPE.dtype_bytes)
    assert other.nominal.step.step_s == pytest.approx(full.nominal.step.step_s / 2)
    assert other.step_s(4, 100) < full.step_s(4, 100)


def test_steps_take_what_their_nominal_cost_says() -> None:
    planner = planner_of(SLOW, max_ranks=1, step=WorkCost(1.0, 0.5, 0.01, 9.0))
    assert planner.step_s(4, 100) == pytest.approx(1.0 + 4 * 0.5 + 400 * 0.01)
