"""What `baton status` shows of groups: what their workers said, and nothing of those that do not answer."""

import io
from dataclasses import asdict, replace

from rich.console import Console, RenderableType

from baton.calls.cluster_state import ClusterState, GenerationStatus, GroupState, KvLedger, PrefillStatus
from baton.planning.device_profile import nominal_core, nominal_gpu
from baton.transport.proto_types import kernels_to_proto
from baton.types import KernelChoice
from baton.v1.common_pb2 import DeviceProfile, PrefixStoreStatus
from baton.v1.generate_pb2 import DraftCounts, DraftSource, SpeculationStatus
from deploy.commands.status import drafts_of, groups_table, processors_of, slots_table

MIB = 2**20
KERNELS = kernels_to_proto(KernelChoice("Zen [12]", "dot", "widened", 64))
STORE = PrefixStoreStatus(num_bytes=3 * MIB, limit_bytes=8 * MIB, num_bytes_fetched=2 * MIB, num_bytes_sent=MIB)
KV = KvLedger(
    num_bytes=64 * MIB,
    num_bytes_free=32 * MIB,
    num_bytes_leased=8 * MIB,
    num_bytes_active=16 * MIB,
    num_bytes_quarantined=8 * MIB,
)
BUSY = GenerationStatus(
    num_slots=8,
    num_free=3,
    num_leased=2,
    num_active=2,
    num_quarantined=1,
    num_bytes_held=5 * MIB,
    num_preemptions=6,
    kv=KV,
    residency="infinigen",
    is_approximate=True,
    kernels=KERNELS,
)
GENERATE = GroupState("generate-0", "generate", ("h:1",), 0, True, 0, 5, generation=BUSY)
RANKS = {rank: PrefillStatus(kernels=KERNELS, prefix_store=STORE) for rank in range(2)}
PREFILL = GroupState("prefill-0", "prefill", ("h:2", "h:3"), 4, True, 0, 1, ranks=RANKS)
SILENT = GroupState("generate-1", "generate", ("h:4",), 0, False, 0, 0)
STATE = ClusterState((PREFILL, GENERATE, SILENT), 0, 0, 0, "v")


def rows(shown: RenderableType) -> list[list[str]]:
    """The words of each line that is shown."""
    console = Console(file=io.StringIO(), width=160)
    with console.capture() as captured:
        console.print(shown)
    return [line.split() for line in captured.get().splitlines()]


def test_groups_are_shown_with_their_work() -> None:
    _, prefill, generate, silent = rows(groups_table(STATE))
    assert prefill == ["prefill-0", "yes", "4", "1", "0", "h:2", "h:3"]
    assert generate == ["generate-0", "yes", "0", "5", "0", "6", "h:1"]
    assert silent == ["generate-1", "no", "0", "0", "0", "h:4"]


def test_slots_and_memory_are_shown_by_state() -> None:
    _, slots, memory, store = rows(slots_table(STATE))
    assert slots == ["generate-0", "slots", "8", "3", "2", "2", "1"]
    assert memory == ["infinigen", "(approximate)", "KV,", "MiB", "64.0", "32.0", "8.0", "16.0", "8.0", "5.0"]
    assert store == ["prefill-0", "prefixes,", "MiB", "8.0", "5.0", "3.0", "2.0", "1.0"]


def test_groups_that_draft_say_what_is_accepted() -> None:
    assert not list(drafts_of(STATE))
    sources = [
        DraftSource(counts=DraftCounts(source="streaming", num_rounds=150, num_drafted=400, num_accepted=300)),
        DraftSource(counts=DraftCounts(source="ngram")),
    ]
    drafting = SpeculationStatus(num_drafts=32, predicted_s=0.19, measured_s=0.2, sources=sources)
    idle = SpeculationStatus(measured_s=0.02, sources=sources[1:])
    groups = [
        GroupState(f"g-{index}", "generate", (), 0, True, 0, 0, generation=GenerationStatus(speculation=each))
        for index, each in enumerate((drafting, idle))
    ]
    accepted = "streaming 300 of 400 (75%; 2.0 a round), ngram none"
    assert list(drafts_of(ClusterState(tuple(groups), 0, 0, 0, "v"))) == [
        f"g-0: drafts accepted so far: {accepted}; latest round: 32 drafts, 200 ms, predicted 190 ms",
        "g-1: drafts accepted so far: ngram none; latest round: 0 drafts, 20 ms",
    ]


def test_groups_on_one_device_share_a_line() -> None:
    core, gpu = nominal_core(2), nominal_gpu("NVIDIA L4", 2)
    profiles = [DeviceProfile(**asdict(each)) for each in (core, gpu, replace(core, used_bytes=1))]
    ranks = {rank: PrefillStatus(kernels=KERNELS, profile=each) for rank, each in enumerate(profiles)}
    engine = GenerationStatus(kernels=KERNELS, profile=profiles[1])
    groups = replace(PREFILL, ranks=ranks), replace(GENERATE, generation=engine)
    _, *devices = processors_of(ClusterState(groups, 0, 0, 0, "v"))
    assert devices == [f"prefill-0 on {core}", f"prefill-0, generate-0 on {gpu}"]


def test_groups_on_one_kind_of_processor_share_a_line() -> None:
    assert list(processors_of(STATE)) == [
        "prefill-0, generate-0 on Zen [12]: attention dot, linear layers widened, from 64 rows on by torch"
    ]
