"""What a run comes to, against calculations of other kinds from the same instants."""

import math
from dataclasses import replace

import numpy as np
import pytest

from baton_lab.bench.loops import Arrivals, Run, Users
from baton_lab.bench.records import Record, TokenCounts
from baton_lab.bench.statistics import Percentiles, doubts, is_good, summarize

LOAD = Arrivals("4/s", 4.0, [])


def made(seed: int, num: int = 200) -> list[Record]:
    """Answered requests with random instants, each of as many messages as tokens."""
    generator, records = np.random.default_rng(seed), []
    for number in range(num):
        due_s = float(generator.uniform(0, 50))
        sent_s = due_s + float(generator.exponential(0.001))
        num_tokens = int(generator.integers(1, 40))
        message_s = sent_s + 0.2 + np.cumsum(generator.exponential(0.03, num_tokens))
        end_s = float(message_s[-1]) + 0.001
        counts = TokenCounts(int(generator.integers(1, 900)), num_tokens, int(generator.integers(0, 2)) * 16)
        records.append(Record(number, 0, due_s, sent_s, end_s, num_tokens, tuple(map(float, message_s)), counts))
    return records


def run_of(records: list[Record], **fields: float) -> Run:
    return Run(LOAD, records, seconds=60.0, **fields)  # type: ignore[arg-type]


def test_percentiles_are_those_of_numpy_and_of_a_sorted_list() -> None:
    values = [float(each) for each in range(101)]
    assert Percentiles.of(values) == Percentiles(50.0, 50.0, 90.0, 99.0)
    assert Percentiles.of([3.0]) == Percentiles(3.0, 3.0, 3.0, 3.0)
    assert all(math.isnan(each) for each in vars(Percentiles.of([])).values())


def test_latencies_and_rates_are_those_of_numpy() -> None:
    records = made(1)
    summary = summarize(run_of(records, used_s=6.0), {})
    # As a plain array calculation sees the same records: padded with nan, one row a request.
    times = np.full((len(records), 40), np.nan)
    for row, each in zip(times, records, strict=True):
        row[: len(each.message_s)] = each.message_s
    due = np.array([each.due_s for each in records])
    tokens = np.array([(~np.isnan(row)).sum() for row in times])
    last = np.nanmax(times, axis=1)
    several = tokens > 1
    expected = {
        "ttft": times[:, 0] - due,
        "tpot": ((last - times[:, 0])[several]) / (tokens[several] - 1),
        "itl": np.diff(times, axis=1)[~np.isnan(np.diff(times, axis=1))],
        "e2el": np.array([each.end_s for each in records]) - due,
    }
    for metric, values in expected.items():
        found = summary.latencies[metric]
        assert found.mean == pytest.approx(np.mean(values))
        assert (found.p50, found.p90, found.p99) == pytest.approx(np.quantile(values, (0.5, 0.9, 0.99)))
    assert summary.requests_s == pytest.approx(200 / 60)
    assert summary.output_tokens_s == pytest.approx(tokens.sum() / 60)
    prompts = np.array([(each.counts.num_prompt, each.counts.num_cached) for each in records if each.counts])
    assert summary.prompt_tokens_s == pytest.approx(prompts[:, 0].sum() / 60)
    assert summary.cached_share == pytest.approx(prompts[:, 1].sum() / prompts[:, 0].sum())
    assert summary.mean_output_tokens == pytest.approx(tokens.mean())
    assert summary.used_cores == pytest.approx(0.1)
    assert summary.lateness.p99 == pytest.approx(np.quantile([each.sent_s - each.due_s for each in records], 0.99))


def test_goodput_counts_what_meets_all_targets() -> None:
    records, targets = made(2), {"ttft": 0.23, "tpot": 0.03, "e2el": 0.8}
    summary = summarize(run_of(records), targets)
    num_good = 0
    for each in records:
        first, last, num = each.message_s[0], each.message_s[-1], len(each.message_s)
        is_in_time = first <= each.due_s + 0.23 and each.end_s <= each.due_s + 0.8
        num_good += is_in_time and last - first <= 0.03 * (num - 1)
    assert 0 < num_good < len(records)
    assert (summary.num_good, summary.goodput, summary.good_share) == (num_good, num_good / 60, num_good / 200)


def test_failed_and_unasked_requests_are_counted_and_are_not_good() -> None:
    answered = made(3, 6)
    failed = [replace(each, failure=kind, counts=None) for each, kind in zip(made(4, 3), ("a", "b", "a"), strict=True)]
    run = Run(LOAD, [*answered, *failed], num_unasked=1, seconds=60.0)
    summary = summarize(run, {"e2el": 1e9})
    assert dict(summary.failures) == {"a": 2, "b": 1}
    assert (summary.num_requests, summary.num_answered, summary.num_good) == (9, 6, 6)
    assert summary.good_share == pytest.approx(6 / 10)
    assert summary.latencies == summarize(run_of(answered), {}).latencies


def test_a_run_without_answers_has_no_latencies() -> None:
    failed = [replace(each, failure="a", counts=None, message_s=()) for each in made(5, 3)]
    summary = summarize(run_of(failed), {"ttft": 1.0})
    assert math.isnan(summary.latencies["ttft"].p50) and summary.requests_s == 0
    assert summary.good_share == 0 and math.isnan(summary.cached_share)


def test_without_targets_there_is_no_goodput() -> None:
    summary = summarize(Run(Users("2 users", 2, 6), made(6, 6), seconds=2.0), {})
    assert (summary.num_good, summary.goodput, summary.good_share, summary.offered_rate) == (None,) * 4


def test_an_answer_of_one_token_misses_no_target_between_tokens() -> None:
    record = Record(0, 0, 0.0, 0.0, 0.5, 1, (0.5,), TokenCounts(3, 1))
    assert record.tpot_s is None and is_good(record, {"tpot": 0.001}) and not is_good(record, {"ttft": 0.4})


def test_tokens_of_a_message_share_its_instant() -> None:
    record = Record(0, 0, 0.0, 0.0, 0.9, 9, (0.1, 0.5, 0.9), TokenCounts(3, 9))
    assert record.tpot_s == pytest.approx(0.1) and record.gaps_s == pytest.approx([0.4, 0.4])


def test_numbers_that_may_not_be_the_servers_are_doubted() -> None:
    fine = made(7, 50)
    assert doubts(summarize(run_of(fine), {}), may_end_early=False) == []
    late = [replace(each, sent_s=each.due_s + 0.05) for each in fine]
    (line,) = doubts(summarize(run_of(late), {}), may_end_early=False)
    assert line.startswith("requests were sent 50 ms late")
    (line,) = doubts(summarize(run_of(fine, used_s=59.0), {}), may_end_early=False)
    assert line.startswith("this process used 0.98 cores")
    (line,) = doubts(summarize(run_of([replace(each, counts=None) for each in fine]), {}), may_end_early=False)
    assert line.startswith("the server did not count the tokens of 50 answers")
    short = summarize(run_of([replace(each, max_tokens=99) for each in fine]), {})
    assert doubts(short, may_end_early=False) == ["50 answers had fewer tokens than were asked for"]
    assert doubts(short, may_end_early=True) == []
