"""What clients are told of a cluster is what the orchestrator knows and what the workers said."""

import pytest

from baton import __version__
from baton.calls.cluster_state import (
    ClusterState,
    GenerationStatus,
    GroupState,
    KvLedger,
    PrefillStatus,
    cluster_state_from_proto,
    cluster_state_to_proto,
    group_state_from_proto,
    group_state_to_proto,
)
from baton.errors import VersionMismatchError
from baton.v1 import orchestrator_pb2
from baton.v1.common_pb2 import PrefixStoreStatus

STORE = PrefixStoreStatus(identity="n:1", num_blocks=12, num_bytes=2**33, limit_bytes=2**34)
GENERATION = GroupState(
    name="g",
    role="generate",
    endpoints=("h:1",),
    epoch=0,
    is_ready=True,
    num_leaked=1,
    num_requests=5,
    is_drained=True,
    is_broken=True,
    generation=GenerationStatus(num_slots=16, num_free=9, imbalance="1 is not 2", prefix_store=STORE),
)
RANKS = {2: PrefillStatus(epoch=7, num_jobs=3, prefix_store=STORE), 0: PrefillStatus(epoch=7)}
CHAIN = GroupState("p", "prefill", ("h:2", "h:3", "h:4"), 7, False, 0, 0, ranks=RANKS)
SILENT = GroupState("s", "generate", ("h:5",), 0, False, 0, 0)


def test_a_cluster_s_state_round_trips() -> None:
    state = ClusterState(
        groups=(GENERATION, CHAIN, SILENT),
        num_queued=2,
        num_running=1,
        num_degraded=4,
        version=__version__,
        num_queued_tokens=99,
        why_not_serving=("a", "b"),
        why_degraded=("c",),
        metrics_endpoint="h:9",
    )
    assert cluster_state_from_proto(cluster_state_to_proto(state)) == state


def test_a_group_that_does_not_answer_has_no_status() -> None:
    read = group_state_from_proto(group_state_to_proto(SILENT))
    assert (read.generation, read.statuses, read.prefix_store, read.imbalance) == (None, (), None, "")


def test_statuses_come_in_rank_order_and_any_of_them_knows_the_node_s_store() -> None:
    assert CHAIN.statuses == (RANKS[0], RANKS[2])
    assert CHAIN.prefix_store == GENERATION.prefix_store == STORE
    assert (GENERATION.imbalance, CHAIN.imbalance) == ("1 is not 2", "")


def test_overdrawn_memory_is_told_as_it_is() -> None:
    overdrawn = GenerationStatus(kv=KvLedger(num_bytes=10, num_bytes_free=-2, num_bytes_leased=12))
    told = GroupState("g", "generate", ("h:1",), 0, True, 0, 0, generation=overdrawn)
    read = group_state_from_proto(group_state_to_proto(told)).generation
    assert read is not None and read.kv.num_bytes_free == -2


@pytest.mark.parametrize("version", ["0.1.0", ""])
def test_the_state_of_another_version_s_server_is_refused(version: str) -> None:
    with pytest.raises(VersionMismatchError, match="^the orchestrator .*: run one version on both sides$"):
        cluster_state_from_proto(orchestrator_pb2.ClusterState(version=version))
