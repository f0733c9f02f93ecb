"""What a client is told of a request's times is what the server wrote down; what it asks is what the server reads."""

from dataclasses import replace

import pytest

from baton.errors import InvalidArgumentError
from baton.proto_types import (
    cluster_state_from_proto,
    cluster_state_to_proto,
    kv_ledger_from_proto,
    kv_ledger_to_proto,
    priority_from_proto,
    priority_to_proto,
    timings_from_proto,
    timings_to_proto,
    usage_from_proto,
)
from baton.results import (
    ClusterState,
    GroupState,
    Interval,
    KvLedger,
    Placement,
    PlacementTerms,
    PrefixHoldings,
    RankTiming,
    Timings,
    Usage,
    WidthChoice,
    WidthOption,
)
from baton.types import Priority, TokenRange
from baton.v1 import orchestrator_pb2

RANK = RankTiming(1, TokenRange(3, 9), 10, 20, 0.5, 11, 21, 300, 200, (Interval(10, 12), Interval(12, 20)), 2, 0.25)
WIDTH = WidthChoice(1, 2, 3, 4, (WidthOption(1, 0.5, 0.25), WidthOption(2, 0.375, 1.0)))


PLACEMENT = Placement("local_faster", PlacementTerms(1, 2, 3, 4, 5), PlacementTerms(0.5, 0.25, 0, 0, 0))


@pytest.mark.parametrize(
    "timings",
    [
        Timings(1, 2, 3, 4, 5, (RANK,), WIDTH),
        Timings(1, 2, 3, 4, 5, (), None, PLACEMENT),
        Timings(1, 2, 3, 4, 5, (), None, Placement("never"), "infinigen"),
    ],
)
def test_timings_round_trip(timings: Timings) -> None:
    assert timings_from_proto(timings_to_proto(timings)) == timings


def test_usage_says_what_was_cached() -> None:
    message = orchestrator_pb2.Usage(num_prompt_tokens=9, num_output_tokens=4, num_attempts=2, num_cached_tokens=8)
    assert usage_from_proto(message) == Usage(9, 4, 2, 8)


def test_a_choice_says_what_was_predicted_for_it() -> None:
    assert WIDTH.predicted_s == 0.5
    assert WIDTH.reason == (
        "1 of 2 ranks behind 3 of 4 jobs; predicted seconds, own + others', by width: "
        "1: 0.500 + 0.250, 2: 0.375 + 1.000"
    )


def test_a_choice_of_another_server_may_name_no_option() -> None:
    assert WidthChoice(3, 3, 0, 0, ()).predicted_s is None


def test_a_cluster_s_state_round_trips() -> None:
    kv = KvLedger(num_bytes=100, num_bytes_free=40, num_bytes_leased=30, num_bytes_active=20, num_bytes_quarantined=10)
    group = GroupState(
        name="g",
        role="generate",
        endpoints=("h:1", "h:2"),
        epoch=7,
        is_ready=True,
        num_slots=16,
        num_free=9,
        num_bytes_held=2**40,
        num_leaked=1,
        num_requests=5,
        num_leased=1,
        num_active=4,
        num_quarantined=2,
        kv=kv,
        num_preemptions=3,
        imbalance="1 is not 2",
        residency="infinigen",
        is_approximate=True,
        is_drained=True,
        is_broken=True,
        prefixes=PrefixHoldings(12, 2**33, 2**34, num_bytes_read=2**35, num_disk_bytes_read=7, num_bytes_stored=2**36),
    )
    state = ClusterState(
        groups=(group, replace(group, name="h", kv=KvLedger())),
        num_queued=2,
        num_running=1,
        num_degraded=4,
        version="0.1.0",
        num_queued_tokens=99,
        why_not_serving=("a", "b"),
        why_degraded=("c",),
        metrics_endpoint="h:9",
    )
    assert cluster_state_from_proto(cluster_state_to_proto(state)) == state


def test_overdrawn_memory_does_not_balance_after_the_trip_either() -> None:
    overdrawn = KvLedger(num_bytes=10, num_bytes_free=-2, num_bytes_leased=12)
    assert overdrawn.imbalance and kv_ledger_from_proto(kv_ledger_to_proto(overdrawn)).imbalance


@pytest.mark.parametrize("priority", Priority)
def test_priority_round_trips(priority: Priority) -> None:
    assert priority_from_proto(priority_to_proto(priority)) is priority


def test_no_priority_is_standard_and_one_of_another_version_is_refused() -> None:
    assert priority_from_proto(orchestrator_pb2.PRIORITY_UNSPECIFIED) is Priority.STANDARD
    with pytest.raises(InvalidArgumentError, match=r"priority = 9 is unknown: use 1 \(interactive\), 2 \(standard\)"):
        priority_from_proto(orchestrator_pb2.GenerateRequest(priority=9).priority)  # type: ignore[arg-type]
