"""Traces: generators by seed, and the three public formats."""

from pathlib import Path

import numpy as np
import pytest

from baton.errors import InvalidArgumentError
from baton_lab.traffic.traces.generators import (
    OUTPUT_HEAVY,
    PROMPT_HEAVY,
    Phase,
    bimodal,
    bursty,
    diurnal,
    shifting,
    steady,
)
from baton_lab.traffic.traces.trace import Trace
from baton_lab.traffic.traces.trace_files import read_trace
from tests.support.folders import ROOT

DATA = ROOT / "tests/data"


@pytest.mark.parametrize("make", [steady, bursty, diurnal, bimodal])
def test_generators_keep_their_rate_and_repeat_themselves(make: type) -> None:
    trace, again, other = (make(20.0, 500.0, seed) for seed in (1, 1, 2))
    assert len(trace) == pytest.approx(10_000, rel=0.1)
    assert np.array_equal(trace.arrivals_s, again.arrivals_s)
    assert np.array_equal(trace.output_tokens, again.output_tokens)
    assert not np.array_equal(trace.prompt_tokens[:50], other.prompt_tokens[:50])


def test_bursty_gaps_vary_more_than_steady_ones() -> None:
    def scv(trace: Trace) -> float:
        gaps = np.diff(trace.arrivals_s)
        return float(gaps.var() / gaps.mean() ** 2)

    assert scv(steady(20.0, 500.0, 1)) == pytest.approx(1.0, abs=0.2)
    assert scv(bursty(20.0, 500.0, 1)) == pytest.approx(8.0, rel=0.3)


def test_diurnal_traffic_is_busiest_in_the_middle() -> None:
    counts, _ = np.histogram(diurnal(50.0, 400.0, 3).arrivals_s, 4, (0, 400))
    assert min(counts[1:3]) > 1.5 * max(counts[0], counts[3])


def test_phases_have_their_own_lengths_and_rates() -> None:
    trace = shifting([Phase(100.0, 5.0, PROMPT_HEAVY), Phase(100.0, 20.0, OUTPUT_HEAVY)], 1)
    is_first = trace.arrivals_s < 100
    assert is_first.sum() == pytest.approx(500, rel=0.2)
    assert trace.prompt_tokens[is_first].mean() == pytest.approx(6000, rel=0.1)
    assert trace.output_tokens[~is_first].mean() == pytest.approx(512, rel=0.1)


def test_azure_times_count_from_the_first_request() -> None:
    trace = read_trace(DATA / "trace_azure.csv")
    assert trace.arrivals_s == pytest.approx([0, 4.314579, 4.541877, 65.044137], abs=1e-5)
    assert trace.prompt_tokens.tolist() == [374, 396, 879, 91]
    assert trace.output_tokens.tolist() == [44, 109, 55, 16]


def test_burst_gpt_leaves_out_requests_without_an_answer() -> None:
    trace = read_trace(DATA / "trace_burstgpt.csv")
    assert trace.arrivals_s.tolist() == [0.0, 40.0, 115.0]
    assert trace.output_tokens.tolist() == [18, 230, 276]


def test_mooncake_has_blocks() -> None:
    trace = read_trace(DATA / "trace_mooncake.jsonl")
    assert trace.arrivals_s.tolist() == [0.0, 1.5, 3.0]
    assert trace.blocks == ((0, 1, 2), (0, 1, 3, 4), (5,))
    assert trace.first(1).blocks == ((0, 1, 2),)
    assert trace.faster(3.0).arrivals_s.tolist() == [0.0, 0.5, 1.0]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "no known format"),
        ("a,b\n1,2\n", "no known format"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,2\n", "trace.csv:2"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,x,2\n", "trace.csv:2"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "no request"),
        ('{"timestamp": 0}\n', "input_length is missing"),
        ("{nonsense\n", "trace.csv:1: is not valid JSON"),
        ("Timestamp,Request tokens,Response tokens\n1,2.5,1\n", "Request tokens = '2.5'"),
    ],
)
def test_bad_files_are_refused_by_line(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(InvalidArgumentError, match=complaint):
        read_trace(path)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="cannot be read"):
        read_trace(tmp_path / "none.csv")


def test_bad_traces_are_refused() -> None:
    ones = np.ones(2, dtype=np.int64)
    with pytest.raises(InvalidArgumentError, match="do not ascend"):
        Trace("t", np.array([1.0, 0.0]), ones, ones)
    with pytest.raises(InvalidArgumentError, match="output_tokens from 0"):
        Trace("t", np.array([0.0, 1.0]), ones, ones - 1)
    with pytest.raises(InvalidArgumentError, match="no requests"):
        steady(0.001, 1.0, 1)
    with pytest.raises(InvalidArgumentError, match="rate = 0"):
        steady(0.0, 1.0, 1)
