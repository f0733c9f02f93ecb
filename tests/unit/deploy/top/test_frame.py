"""Frames of `baton top`: all of a cluster's state in 80 columns."""

import io
from dataclasses import replace

import pytest
from rich.console import Console, RenderableType

from baton.calls.cluster_state import (
    ClusterState,
    GenerationStatus,
    GroupState,
    KvLedger,
    PrefillStatus,
    Scaling,
    StepSample,
)
from baton.v1.common_pb2 import PrefixStoreStatus
from baton.v1.generate_pb2 import SpeculationStatus
from deploy.top.frame import frame, size
from deploy.top.rates import Rates
from deploy.top.sampling import Snapshot

GIB = 2**30
STORE = PrefixStoreStatus(identity="node-0", num_bytes=3 * GIB, limit_bytes=8 * GIB, num_disk_bytes_read=5)
KV = KvLedger(num_bytes=64 * GIB, num_bytes_free=48 * GIB, num_bytes_leased=8 * GIB, num_bytes_active=8 * GIB)
BUSY = GenerationStatus(
    num_slots=128,
    num_free=123,
    num_leased=3,
    num_active=2,
    kv=KV,
    last_step=StepSample(num_rows=2, duration_s=0.1234),
    speculation=SpeculationStatus(num_drafted=400, num_accepted=300),
    prefix_store=STORE,
)
RANKS = {0: PrefillStatus(num_jobs=2, prefix_store=STORE), 2: PrefillStatus(num_jobs=1, stall="no progress for 9 s")}
STATE = ClusterState(
    (
        GroupState("generate-0", "generate", ("h:1",), 0, True, 0, 5, generation=BUSY),
        GroupState("generate-1", "generate", ("h:4",), 0, False, 0, 0),
        GroupState("prefill-0", "prefill", ("h:2", "h:3", "h:5"), 412, True, 0, 1, is_drained=True, ranks=RANKS),
        GroupState("prefill-0-lent", "generate", ("h:6",), 1, True, 0, 0, lender="prefill-0", is_broken=True),
    ),
    num_queued=31,
    num_running=12,
    num_degraded=0,
    version="0.2",
    num_queued_tokens=123_456,
    why_degraded=("group generate-1 does not answer",),
    scaling=Scaling("act", 2, 1, "2 prefill groups and 1 generation group: " + "much is to be said of it " * 4),
)
RATES = Rates(
    seconds=30.0,
    requests=123.4,
    refused=1.5,
    prompt_tokens=98_765.4,
    output_tokens=12_345.6,
    cached_share=0.42,
    first_token_s=(0.4, 31.5),
    token_s=(0.031, None),
    steps={"generate-0": 19.64},
    jobs={"prefill-0": 2.25},
    pushed_bytes=1.5 * GIB,
    read_bytes={"memory": 0.25 * GIB, "disk": 17.0},
)


def shown(renderable: RenderableType, width: int = 80) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    with console.capture() as captured:
        console.print(renderable)
    return captured.get().splitlines()


def line_of(lines: list[str], beginning: str) -> list[str]:
    """The words of the one line that begins so, without bars."""
    (line,) = [line for line in lines if line.startswith(beginning)]
    return [word for word in line.split() if set(word) - set("\u2501\u2578\u257a")]


@pytest.mark.parametrize("width", [80, 160])
def test_all_of_a_cluster_is_shown_in_80_columns(width: int) -> None:
    lines = shown(frame("127.0.0.1:50051", Snapshot(9.0, STATE, {}), RATES, "12:00:03"), width)
    assert max(map(len, lines)) <= width and not any("\u2026" in line for line in lines)
    assert lines[0].split() == "baton 0.2 at 127.0.0.1:50051 12:00:03 degraded".split()
    assert lines[1] == "group generate-1 does not answer"
    assert lines[2] == "queue 31 requests, 123,456 tokens   running 12"
    assert lines[3] == "123 requests/s   12346 output tokens/s   98765 prompt tokens/s (42% cached)"
    assert "first token p50 400 p95 31500 ms   per token p50 31 p95 - ms   1.50 refused/s" in lines
    assert line_of(lines, "generate-0 ") == ["generate-0", "yes", "5", "5/128", "16.0G/64.0G", "123", "19.6", "75%"]
    assert line_of(lines, "generate-1 ") == ["generate-1", "no", "0"]
    assert line_of(lines, "prefill-0-lent*") == ["prefill-0-lent*", "broken", "0"]
    assert line_of(lines, "prefill-0 ")[:5] == ["prefill-0", "draining", "1", "412", "2.2"]
    assert "0: 2  1: silent  2: no progress for 9 s" in " ".join(lines)
    assert line_of(lines, "slots") == ["slots", "16.0G", "64.0G", "1.5G", "pushed"]
    assert line_of(lines, "prefixes in memory") == ["prefixes", "in", "memory", "3.0G", "8.0G", "256M"]
    assert line_of(lines, "prefixes on disk") == ["prefixes", "on", "disk", "17B"]


def test_what_is_not_known_is_a_dash() -> None:
    lines = shown(frame("t", Snapshot(9.0, STATE, {}, "no metrics from h:9: refused"), None, "12:00:03"))
    assert "no metrics from h:9: refused" in lines
    assert not any("requests/s" in line for line in lines)
    assert line_of(lines, "generate-0")[-2:] == ["-", "75%"]
    assert line_of(lines, "slots") == ["slots", "16.0G", "64.0G", "-"]


def test_a_cluster_without_prefill_groups_has_no_table_of_them() -> None:
    state = replace(STATE, groups=STATE.groups[1:2], why_not_serving=("no group is ready",), scaling=None)
    lines = shown(frame("t", Snapshot(9.0, state, {}), RATES, "12:00:03"))
    assert "NOT SERVING" in lines[0] and "no group is ready" in lines
    assert not any(line.startswith(("prefill", "KV")) for line in lines)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0B"),
        (999, "999B"),
        (1000, "1.0K"),
        (1536, "1.5K"),
        (200 * 1024, "200K"),
        (GIB, "1.0G"),
        (900 * GIB, "900G"),
    ],
)
def test_sizes_are_short(num_bytes: int, text: str) -> None:
    assert size(num_bytes) == text
