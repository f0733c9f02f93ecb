"""What the console is told of a cluster and of requests: every part in its place, as numbers that JSON has."""

import json
from dataclasses import replace
from typing import Any

from baton.calls.cluster_state import ClusterState, GroupState, Scaling
from baton.results.completion import ModelInfo, Usage
from baton.results.prefill_trace import Placement, PlacementTerms, PrefillTrace, RankTiming
from baton.results.request_list import RequestList, RequestStatus
from baton.results.timings import DraftCounts, SpeculationTrace, Timings
from baton.types import FinishReason, TokenRange
from baton.v1 import common_pb2, generate_pb2, prefill_pb2
from gateway.console.views import snapshot

MS = 1_000_000
START_NS = 1_700_000_000_000 * MS
MODEL = ModelInfo("letters", 400, 97, "float32", False, "f")
RANK = RankTiming(1, TokenRange(4, 10), START_NS + 3 * MS, START_NS + 6 * MS, 0.5, START_NS + 4 * MS, START_NS + 8 * MS,
                  300, 200, ())  # fmt: skip
TERMS = PlacementTerms(0.001, 0.002, 0.003, 0.004, 0.1, 0.0)
TIMINGS = Timings(
    START_NS, START_NS + MS, START_NS + 2 * MS, START_NS + 9 * MS, START_NS + 20 * MS, "device",
    PrefillTrace(Placement("chain_faster", TERMS, None), None, (RANK,)),
    SpeculationTrace(3, (DraftCounts("ngram", 2, 6, 4),)),
)  # fmt: skip
ENDED = RequestStatus(
    7, "r7", "acme", "finished", "g0", "p0", Usage(10, 5, 1, 4), TIMINGS, (FinishReason.LENGTH,), "", 1
)
STORE = common_pb2.PrefixStoreStatus(
    identity="node", num_blocks=3, num_bytes=30, limit_bytes=100, num_disk_bytes=7, limit_disk_bytes=1000
)
GENERATE = GroupState(
    "g0", "generate", ("h:1",), 0, True, 0, 2,
    generation=generate_pb2.GenerationStatus(
        num_slots=8, num_free=5, num_leased=1, num_active=2, num_steps=40, device="emulated", num_device_bytes=9,
        num_bytes_held=12, residency="host",
        kv=generate_pb2.KvLedger(num_bytes=100, num_bytes_leased=10, num_bytes_active=20, num_bytes_free=70),
        last_step=generate_pb2.StepSample(num_rows=2, duration_s=0.004, num_drafts=3, predicted_s=0.005),
        prefix_store=STORE,
        speculation=generate_pb2.SpeculationStatus(
            num_drafted=10, num_accepted=4,
            sources=[generate_pb2.DraftSource(counts=generate_pb2.DraftCounts(source="ngram", num_drafted=10))],
        ),
    ),
)  # fmt: skip
PREFILL = GroupState(
    "p0", "prefill", ("h:2", "h:3"), 3, False, 0, 1, is_drained=True,
    ranks={1: prefill_pb2.PrefillStatus(num_jobs=1, num_jobs_done=6, stall="hangs")},
)  # fmt: skip
STATE = ClusterState((PREFILL, GENERATE), 1, 2, 3, "0.2", 44, ("no group",), ("a chain is missing",))


def told(*requests: RequestStatus, state: ClusterState = STATE) -> dict[str, Any]:
    """The view, as a page reads it."""
    whole = snapshot(state, RequestList(START_NS + 50 * MS, requests), MODEL, has_chats=True)
    found: dict[str, Any] = json.loads(json.dumps(whole, allow_nan=False))
    return found


def test_the_cluster_s_own_numbers_and_reasons() -> None:
    found = told()
    assert found["model"] == {"name": "letters", "max_tokens": 400, "has_chats": True}
    counts = [found[name] for name in ("num_queued", "num_queued_tokens", "num_running", "num_degraded")]
    assert counts == [1, 44, 2, 3]
    assert found["why_not_serving"] == ["no group"] and found["why_degraded"] == ["a chain is missing"]
    assert found["scaling"] == ""
    overloaded = Scaling("advise", 1, 2, "more of them", ttft_p95_s=float("inf"))
    assert told(state=replace(STATE, scaling=overloaded))["scaling"] == "advise: more of them"


def test_a_chain_with_a_silent_rank_and_one_in_trouble() -> None:
    group = told()["groups"][0]
    assert (group["readiness"], group["is_silent"], group["generation"]) == ("draining", False, None)
    assert [(rank["num_jobs"], rank["trouble"]) for rank in group["ranks"]] == [(None, ""), (1, "hangs")]


def test_a_generation_group_s_slots_kv_and_store() -> None:
    group = told()["groups"][1]
    held = group["generation"]
    assert held["slots"] == {
        "num_slots": 8, "num_free": 5, "num_leased": 1, "num_active": 2, "num_quarantined": 0,
    }  # fmt: skip
    assert held["kv"]["num_bytes"] == 100 and held["kv"]["num_bytes_free"] == 70
    assert (held["device"], held["num_device_bytes"], held["num_bytes_held"]) == ("emulated", 9, 12)
    assert (held["step"]["took_ms"], held["step"]["predicted_ms"], held["step"]["num_drafts"]) == (4.0, 5.0, 3)
    assert held["speculation"]["sources"] == [{"source": "ngram", "num_drafted": 10, "num_accepted": 0}]
    assert (group["store"]["num_disk_bytes"], group["store"]["limit_disk_bytes"]) == (7, 1000)


def test_a_group_that_does_not_answer_is_said_to_be_silent() -> None:
    silent = replace(GENERATE, generation=None, is_ready=False)
    group = told(state=replace(STATE, groups=(silent,)))["groups"][0]
    assert group["is_silent"] and group["generation"] is None and group["readiness"] == "no"


def test_a_request_that_has_ended() -> None:
    (request,) = told(ENDED)["requests"]
    assert (request["number"], request["id"], request["finish"], request["num_failures"]) == (7, "r7", ["length"], 1)
    assert (request["first_token_ms"], request["total_ms"]) == (9.0, 20.0)
    whole = {each["name"]: (each["from_ms"], each["to_ms"]) for each in request["stages"] if each["rank"] is None}
    assert list(whole) == ["queue", "placement", "prefill", "transfer", "insert", "decode"]
    assert list(whole.values()) == [(0, 1), (1, 2), (2, 6), (6, 8), (8, 9), (9, 20)]
    ranks = [each for each in request["stages"] if each["rank"] == 1]
    assert [each["name"] for each in ranks] == ["prefill_rank", "transfer_rank"]
    assert ranks[0]["known"]["tokens"] == 6 and ranks[1]["known"]["bytes_pushed"] == 300
    taken = request["taken"]
    assert (taken["took_ms"], taken["predicted"]["own_ms"], taken["is_local"]) == (7.0, 10.0, False)
    assert taken["predicted"]["parts"]["others"] == 100.0, "others' delay is no part of its own time"
    assert taken["speculation"]["sources"][0]["num_accepted"] == 4


def test_the_last_stage_of_a_request_that_runs_lasts_until_now() -> None:
    running = replace(ENDED, state="streaming", timings=replace(TIMINGS, finished_ns=0), reasons=())
    (request,) = told(running)["requests"]
    assert request["total_ms"] == 50.0 and request["finish"] == []
    assert next(each for each in request["stages"] if each["name"] == "decode")["to_ms"] == 50.0
    queued = replace(running, state="queued", timings=Timings(START_NS, 0, 0, 0, 0))
    (request,) = told(queued)["requests"]
    assert [(each["name"], each["to_ms"]) for each in request["stages"]] == [("queue", 50.0)]
    assert request["first_token_ms"] is None and request["taken"]["took_ms"] is None
