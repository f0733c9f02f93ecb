"""What a client sees of concurrent requests: seconds, rates and gaps, by the instants of messages."""

import pytest

from benchmarks.support.answers import Answer, Answered

MS = 1_000_000
FIRST = Answer(0, (200 * MS, 210 * MS, 240 * MS), 5)
SECOND = Answer(100 * MS, (400 * MS, 500 * MS), 3)
BOTH = Answered([FIRST, SECOND])


def test_gaps_are_between_messages_and_time_per_token_counts_tokens() -> None:
    assert FIRST.gaps_ms == [10.0, 30.0]
    assert FIRST.tpot_ms == 10.0
    assert FIRST.ttft_s == 0.2


def test_the_rate_is_all_tokens_from_the_first_ask_to_the_last_token() -> None:
    assert BOTH.seconds == 0.5
    assert BOTH.tokens_s == 16.0


def test_medians_are_of_requests_and_gaps_of_all() -> None:
    assert BOTH.ttft_s == pytest.approx(0.25)
    assert BOTH.tpot_ms == pytest.approx((10 + 50) / 2)
    assert BOTH.gap_ms == 30.0
    assert BOTH.p99_ms == 100.0


def test_the_last_request_is_the_one_asked_last() -> None:
    assert BOTH.last_ttft_s == pytest.approx(0.3)
    assert Answered([SECOND, FIRST]).last_ttft_s == pytest.approx(0.3)
