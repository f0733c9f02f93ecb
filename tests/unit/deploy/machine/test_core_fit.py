"""Cores are divided by NUMA nodes, physical cores, memory and bandwidth, on false machines and as others measured."""

import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baton.planning.device_profile import DeviceProfile, save
from baton.planning.hardware import CPU_CORE
from baton.planning.model_shape import ModelShape
from baton_lab.study.known_models import SHAPES
from deploy.config.file import WrittenConfig
from deploy.machine.arrangement import arrange
from deploy.machine.cluster_plan import ClusterPlan
from deploy.machine.core_fit import core_costs
from deploy.machine.device_profile import kept_path
from deploy.machine.doctor import Verdict, check_cores, check_memory
from deploy.machine.pool_plans import core_plans
from deploy.machine.resolved_model import ResolvedModel
from deploy.machine.this_machine import Machine
from tests.support.models.config_folders import LLAMA_8B, SMALL, write_config
from tests.support.sysfs import Shape

pytestmark = pytest.mark.usefixtures("cache")

GIB = 2**30
SNAPSHOT = Path(__file__).parents[3] / "data" / "core_arrangements.txt"
MODELS = {"135M": (SMALL, 134_515_008), "8B": (LLAMA_8B, 8_030_261_248)}
SERVERS = {2: Shape(1, 2), 8: Shape(1, 8), 64: Shape(2, 32, free_kib=128 << 20), 192: Shape(8, 24, 2)}
"""Machines by their number of cores. The one with 192 has 384 hardware threads."""
BANDWIDTHS = {2: 22e9, 8: 40e9, 64: 500e9, 192: 720e9}
"""Memory bandwidth of these machines in bytes per second."""


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> ResolvedModel:
    return model_of(tmp_path, request.param)


def model_of(tmp_path: Path, name: str) -> ResolvedModel:
    """A folder with the header of a weight file, which is all that sizes need."""
    config, num_weights = MODELS[name]
    made = write_config(tmp_path / name, config)
    header = json.dumps({"weights": {"dtype": "BF16", "shape": [num_weights], "data_offsets": [0, 0]}}).encode()
    (made / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    return ResolvedModel(made)


def core_of(bandwidth: float) -> DeviceProfile:
    """A core of Zen 4, on a machine with this memory bandwidth."""
    core = replace(CPU_CORE, linear_flops=2e11, pair_flops=1.6e11, memory_bandwidth=2e10)
    return DeviceProfile("CPU core", "cpu", core, bandwidth, is_measured=True)


def keep(bandwidth: float) -> None:
    """Keep a profile of a core of this machine."""
    path = kept_path("cpu", 2)
    path.parent.mkdir(parents=True, exist_ok=True)
    save(core_of(bandwidth), path)


def machine(shape: Shape, folder: Path, **others: float) -> Machine:
    available = shape.num_nodes * shape.free_kib * 1024
    return replace(Machine(shape.nodes(folder), available, GIB, None), **others)  # type: ignore[arg-type]


def arranged(model: ResolvedModel, here: Machine) -> ClusterPlan:
    return arrange(WrittenConfig({}), model, here)


def workers_of(plan: ClusterPlan) -> list[tuple[int, ...]]:
    """Return the cores of each worker."""
    return [*plan.config.prefill.cores, *plan.config.generate.cores]


def described(plan: ClusterPlan, here: Machine) -> str:
    """Return what a user reads, and the cores of the workers as ranges."""
    findings = [check_cores(plan.config, here), check_memory(plan, here)]
    told = [f"  {finding.name}: {finding.verdict.value}, {finding.text}" for finding in findings]
    pools = {"ranks": plan.config.prefill.cores, "engines": plan.config.generate.cores}
    bound = [f"  {name} on {' '.join(f'{c[0]}-{c[-1]}' for c in cores)}" for name, cores in pools.items() if cores]
    return "\n".join([f"  {plan.why}", *told, *bound])


def test_machines_are_arranged_as_they_were(tmp_path: Path) -> None:
    """All that users are told on some machines. A change that is meant goes into the file, too."""
    told = []
    for name in MODELS:
        model = model_of(tmp_path, name)
        for num_cores, shape in SERVERS.items():
            keep(BANDWIDTHS[num_cores])
            here = machine(shape, tmp_path / f"{name}-{num_cores}")
            told.append(f"{name}, {num_cores} cores\n{described(arranged(model, here), here)}\n")
    assert "".join(told) == SNAPSHOT.read_text()


@pytest.mark.parametrize("num_cores", SERVERS)
def test_workers_have_their_own_cores_of_one_node_each(num_cores: int, model: ResolvedModel, tmp_path: Path) -> None:
    keep(BANDWIDTHS[num_cores])
    here = machine(SERVERS[num_cores], tmp_path / "sys")
    plan = arranged(model, here)
    prefill, generate = plan.config.prefill, plan.config.generate
    assert all(len(cores) == prefill.num_threads for cores in prefill.cores)
    assert all(len(cores) == generate.num_threads for cores in generate.cores)
    bound = workers_of(plan)
    assert len(bound) in (0, plan.config.num_workers) and bool(bound) == (plan.config.num_workers > 1)
    used = [core for cores in bound for core in cores]
    assert len(used) == len(set(used)), "no core has two workers"
    physical = {cpu: core for node in here.nodes for core in node.cores for cpu in core}
    assert len({physical[cpu] for cpu in used}) == len(used), "no two hardware threads of a core compute"
    assert all(any(set(cores) <= node.cpus for node in here.nodes) for cores in bound), "none spans nodes"
    if len(here.nodes) > 1:
        assert all(any(set(cores) <= node.cpus for cores in generate.cores) for node in here.nodes)
    assert check_cores(plan.config, here).verdict is check_memory(plan, here).verdict is Verdict.OK


def test_one_engine_has_one_hardware_thread_of_each_core(tmp_path: Path) -> None:
    """Where a machine has few, all of them compute, and the engine is not bound."""
    keep(1e12)
    model = model_of(tmp_path, "135M")
    many, few = (
        arranged(model, machine(Shape(1, cores, 2), tmp_path / str(cores), available_bytes=GIB)).config.generate
        for cores in (4, 2)
    )
    assert (many.num_groups, many.num_threads, many.cores) == (1, 4, ((0, 1, 2, 3),))
    assert (few.num_groups, few.num_threads, few.cores) == (1, 4, ())


@pytest.mark.parametrize("bandwidth", [5e9, 2e10])
def test_more_cores_serve_no_fewer_requests(bandwidth: float) -> None:
    """On one node and on several, whether or not each core adds memory bandwidth."""
    for shape in SHAPES["smollm2-135m"], SHAPES["llama-3.1-8b"]:
        rates = []
        for num_nodes, each in [(1, 2), (1, 3), (1, 4), (1, 8), (1, 12), (1, 16), (2, 12), (2, 16), (4, 24), (8, 24)]:
            costs = core_costs(shape, core_of(bandwidth * min(each, 8) * num_nodes), 16)
            rates.append(max(plan.requests_per_s for plan in core_plans(costs, [each] * num_nodes, lambda plan: True)))
        assert rates == sorted(rates)


def test_little_memory_is_for_fewer_workers(tmp_path: Path) -> None:
    """A node holds one copy of the weights. With memory for few copies, few nodes are used; without, one
    engine uses all."""
    keep(BANDWIDTHS[192])
    model, numbers = model_of(tmp_path, "8B"), []
    for free_gib in (64, 18, 16, 3):
        here = machine(Shape(8, 24, 2, free_kib=free_gib << 20), tmp_path / str(free_gib))
        numbers.append(arranged(model, here).config.num_workers)
    assert numbers == [16, 8, 1, 1]
    scarce = machine(SERVERS[192], tmp_path / "scarce", available_bytes=64 * GIB)
    plan = arranged(model, scarce)
    assert plan.config.num_workers == 6
    assert {len(node.cpus & set(cores)) for node in scarce.nodes[3:] for cores in workers_of(plan)} == {0}


def test_weights_of_a_node_are_counted_once(tmp_path: Path) -> None:
    model, weights = model_of(tmp_path, "8B"), 2 * 8_030_261_248
    here = machine(Shape(2, 8), tmp_path / "sys")

    def host_bytes(**sections: Any) -> int:
        return ClusterPlan(WrittenConfig(sections).config, model).host_weight_bytes(here)

    def pools(generate: list[list[int]], prefill: list[list[int]]) -> dict[str, Any]:
        engines = {"num_groups": len(generate), "cores": generate}
        return {"generate": engines, "prefill": {"num_groups": 1, "num_ranks": len(prefill), "cores": prefill}}

    assert host_bytes() == weights, "without cores, all workers have one copy"
    assert host_bytes(**pools([[0, 1]], [[2], [3]])) == weights
    assert host_bytes(**pools([[0], [8]], [[2], [9]])) == 2 * weights
    assert host_bytes(**pools([[0], [7, 8]], [[2], [9]])) == 3 * weights, "one worker is on both nodes"
    emulated = {"generate": {"device": "emulated", "num_groups": 2}}
    assert host_bytes(**emulated) == 3 * weights
    drafts = {"speculation": "model", "draft_model": str(model.folder)}
    assert host_bytes(generate=drafts) == 2 * weights


def test_a_quota_of_the_container_is_what_is_divided(tmp_path: Path) -> None:
    """Its cores are not known, so no worker is bound."""
    keep(BANDWIDTHS[192])
    here = machine(SERVERS[192], tmp_path / "sys", cpu_quota=6.5)
    plan = arranged(model_of(tmp_path, "135M"), here)
    prefill, generate = plan.config.prefill, plan.config.generate
    num_ranks = prefill.num_groups * prefill.num_ranks
    assert generate.num_groups * generate.num_threads + num_ranks * prefill.num_threads == 6
    assert plan.why.startswith("6 cores: ") and not workers_of(plan)


PHI_14B = ModelShape(40, 5120, 40, 10, 128, ffn=17920, vocab=100352)
LLAMA_70B = ModelShape(80, 8192, 64, 8, 128, ffn=28672, vocab=128256)
EPYC_9554, TWO_9175F, TWO_2698B = ((64,), 460.8e9), ((16, 16), 409.6e9), ((16, 16), 59.7e9)
"""Cores of each node of some servers, and the bytes per second of a node's DRAM as its channels and clock give it."""
SUSTAINED = 0.8
"""Fraction of the bandwidth of DRAM that reading reaches."""


@pytest.mark.parametrize(
    ("shape", "weight_bytes", "server", "spans", "tokens_per_s"),
    [
        # https://ahelpme.com/?p=6685: llama.cpp on one EPYC 9554, 12 x DDR5-4800; Phi-4 as Q8_0 and as Q4_K_M
        (PHI_14B, 14.51 * GIB, EPYC_9554, False, 19.19),
        (PHI_14B, 8.43 * GIB, EPYC_9554, False, 28.74),
        # https://github.com/ggml-org/llama.cpp/issues/11744: two EPYC 9175F, 16 x DDR5-6400; Llama 3.1 70B as f16,
        # with weights where the threads that read them run, and wherever they were loaded
        (LLAMA_70B, 141e9, TWO_9175F, False, 4.31),
        (LLAMA_70B, 141e9, TWO_9175F, True, 2.4),
        # https://github.com/ggml-org/llama.cpp/pull/1556: two Xeon E5-2698B v3, 8 x DDR3-1866; 7B as q4_0, 32 threads
        (SHAPES["llama-7b"], 3.8e9, TWO_2698B, True, 9.06),
    ],
)
def test_steps_take_the_time_that_others_measured(
    shape: ModelShape, weight_bytes: float, server: tuple[tuple[int, ...], float], spans: bool, tokens_per_s: float
) -> None:
    """Within a factor of 1.4: tokens a second of one sequence on each engine, with few tokens of context.

    Where all cores of a machine compute one token together, with weights on all nodes, one engine on each node is
    predicted to generate as many tokens in total.
    """
    node_cores, bandwidth = server
    core = core_of(SUSTAINED * bandwidth * len(node_cores))
    costs = core_costs(shape, core, 1, bytes_per_weight=weight_bytes / shape.step_weights)
    num_threads, num_engines = (sum(node_cores), 1) if spans else (node_cores[0], len(node_cores))
    step_s = costs.of(num_threads, 1 / len(node_cores)).step.plain_s(1, 100)
    assert tokens_per_s / 1.4 < num_engines / step_s < tokens_per_s * 1.4


@pytest.mark.parametrize(
    ("name", "here", "settings", "num_slots"),
    [
        pytest.param("135M", (2, 24), {}, 32, id="slow-cores"),
        pytest.param("135M", (8, 24), {}, 64, id="fast-cores"),
        pytest.param("135M", (192, 1024), {}, 64, id="several-nodes"),
        pytest.param("135M", (2, 3.2), {}, 16, id="memory-for-weights"),
        pytest.param("135M", (2, 24), {"kv_memory_bytes": GIB}, 16, id="little-kv"),
        pytest.param("135M", (2, 24), {"residency": "host"}, 16, id="memory-for-each-slot"),
        pytest.param("135M", (2, 24), {"device_memory_bytes": GIB}, 16, id="limited-device"),
        pytest.param("135M", (2, 24), {"speculation": "snapkv"}, 16, id="drafts-that-select-keys"),
        pytest.param("135M", (2, 24), {"num_slots": 5}, 5, id="configured"),
        pytest.param("8B", (2, 64), {}, 16, id="slow-steps"),
    ],
)
def test_engines_have_as_many_slots_as_memory_and_the_time_of_a_step_permit(
    tmp_path: Path, name: str, here: tuple[int, float], settings: dict[str, Any], num_slots: int
) -> None:
    """`here`: number of cores, and GiB of free memory."""
    num_cores, free_gib = here
    keep(BANDWIDTHS[num_cores])
    found = machine(SERVERS[num_cores], tmp_path / "sys", available_bytes=int(free_gib * GIB))
    plan = arrange(WrittenConfig({"generate": settings}), model_of(tmp_path, name), found)
    assert plan.config.generate.num_slots == num_slots
