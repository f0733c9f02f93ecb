"""GPUs that can hold a model serve it; the others, and machines without such GPUs, are named with a remedy."""

import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baton.errors import ConfigError
from baton.planning.device_profile import DeviceProfile, save
from baton.planning.hardware import CPU_CORE
from deploy.config.file import WrittenConfig
from deploy.machine.arrangement import arrange
from deploy.machine.cluster_plan import ClusterPlan
from deploy.machine.device_profile import kept_path
from deploy.machine.doctor import Verdict, check_devices, check_memory, require
from deploy.machine.resolved_model import ResolvedModel
from deploy.machine.this_machine import GpuState, Machine
from tests.support.models.config_folders import LLAMA_8B, write_config
from tests.support.sysfs import flat_nodes

pytestmark = pytest.mark.usefixtures("cache")

GIB, MIB = 2**30, 2**20
SNAPSHOT = Path(__file__).parents[3] / "data" / "gpu_arrangements.txt"
KINDS = {"NVIDIA H200": 143771, "NVIDIA L4": 23034, "NVIDIA Foo 9000": 49140}
"""Kinds of GPUs and their memory in MiB. The last one is not known: the rates of an L4 are assumed."""


@pytest.fixture
def model(tmp_path: Path) -> ResolvedModel:
    """A model of 8 billion weights. The rates of this machine's cores are known."""
    core = replace(CPU_CORE, linear_flops=2e11, pair_flops=1.6e11, memory_bandwidth=1e10)
    for dtype_bytes in (2, 4):
        path = kept_path("cpu", dtype_bytes)
        path.parent.mkdir(parents=True, exist_ok=True)
        save(DeviceProfile("CPU core", "cpu", core, 1e10, is_measured=True), path)
    return model_of(tmp_path / "llama-8b", 8_030_261_248)


def model_of(folder: Path, num_weights: int, **config: int) -> ResolvedModel:
    """A folder with the header of a weight file, which is all that sizes need."""
    made = write_config(folder, LLAMA_8B | config)
    header = json.dumps({"weights": {"dtype": "BF16", "shape": [num_weights], "data_offsets": [0, 0]}}).encode()
    (made / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    return ResolvedModel(made)


def gpus(number: int, name: str = "NVIDIA L4", used_mib: int = 1) -> tuple[GpuState, ...]:
    total = KINDS[name] * MIB
    return tuple(GpuState(index, name, total, total - used_mib * MIB, f"GPU-{index}") for index in range(number))


def machine(found: tuple[GpuState, ...] = (), host_gib: int = 256, *, has_cuda: bool = True) -> Machine:
    return Machine(flat_nodes(16), host_gib * GIB, GIB, None, gpus=found, has_cuda=has_cuda)


def arranged(model: ResolvedModel, here: Machine, sections: dict[str, Any] | None = None) -> ClusterPlan:
    return arrange(WrittenConfig(sections or {}), model, here)


def described(plan: ClusterPlan, here: Machine) -> str:
    """Return what a user reads: the reason of the arrangement, and the doctor's findings on devices and memory."""
    findings = [check_devices(plan, here), check_memory(plan, here)]
    told = [f"  {finding.name}: {finding.verdict.value}, {finding.text}" for finding in findings]
    return "\n".join([f"  {plan.why or 'as configured'}", *told])


def test_machines_with_gpus_are_arranged_as_they_were(model: ResolvedModel, tmp_path: Path) -> None:
    """All that users are told on some machines. A change that is meant goes into the file, too."""
    on_cpu = machine(gpus(2), has_cuda=False)
    small = model_of(tmp_path / "small", 100_000_000)
    mixed = (*gpus(1, "NVIDIA H200"), *(replace(gpu, index=1 + gpu.index) for gpu in gpus(2)))
    one_in_use = (*gpus(1), replace(gpus(1, used_mib=6000)[0], index=1))
    unknown = (replace(gpus(1)[0], total_bytes=0, free_bytes=0),)
    machines = {f"{number} x {kind}": machine(gpus(number, kind)) for kind in KINDS for number in (1, 2, 4, 8)}
    cases: dict[str, tuple[ResolvedModel, Machine, dict[str, Any]]] = {
        **{name: (model, here, {}) for name, here in machines.items()},
        "no GPU": (model, machine(), {}),
        "two kinds": (model, machine(mixed), {}),
        "one of two in use": (model, machine(one_in_use), {}),
        "in use, but large enough": (model, machine(gpus(1, "NVIDIA H200", 9000)), {}),
        "memory unknown": (model, machine(unknown), {}),
        "memory unknown, cuda": (model, machine(unknown), {"generate": {"device": "cuda"}}),
        "host memory for two workers": (model, machine(gpus(4), host_gib=5), {}),
        "host memory for none": (small, machine(gpus(1), host_gib=1), {}),
        "model too large": (model_of(tmp_path / "70b", 70_000_000_000), machine(gpus(2)), {}),
        "model too large, cuda": (
            model_of(tmp_path / "70b", 70_000_000_000),
            machine(gpus(2)),
            {"generate": {"device": "cuda"}},
        ),
        "torch without CUDA": (model, on_cpu, {}),
        "configured, too few GPUs": (model, machine(gpus(2)), {"prefill": {"num_ranks": 2}}),
        "configured, too few GPUs, cuda": (
            model,
            machine(gpus(2)),
            {"prefill": {"num_ranks": 2, "device": "cuda"}, "generate": {"device": "cuda"}},
        ),
        "configured, enough GPUs": (model, machine(gpus(4)), {"prefill": {"num_ranks": 2}}),
    }
    told = [f"{name}\n{described(arranged(*case), case[1])}\n" for name, case in cases.items()]
    assert "".join(told) == SNAPSHOT.read_text()


def test_one_gpu_needs_no_option(model: ResolvedModel) -> None:
    config = arranged(model, machine(gpus(1, "NVIDIA H200"))).config
    assert (config.prefill.num_groups, config.generate.num_groups) == (0, 1)
    assert config.prefill.device == config.generate.device == "cuda" and config.num_gpus == 1


def test_a_chain_and_its_engines_have_a_gpu_each(model: ResolvedModel) -> None:
    plan = arranged(model, machine(gpus(8)))
    assert plan.config.prefill.num_groups and plan.config.num_gpus == len(plan.gpus) == 8
    assert "rather than 8 engines of 1 GPU" in plan.why and not plan.gpu_note


@pytest.mark.parametrize("device", ["cuda", "auto"])
def test_a_device_alone_leaves_the_pools_open(model: ResolvedModel, device: str) -> None:
    written = {"prefill": {"device": device}, "generate": {"device": device}}
    assert arranged(model, machine(gpus(2)), written) == arranged(model, machine(gpus(2)))


@pytest.mark.parametrize("sections", [{"generate": {"device": "cpu"}}, {"prefill": {"device": "cpu"}}])
def test_who_asks_for_the_cpu_gets_it_arranged(model: ResolvedModel, sections: dict[str, Any]) -> None:
    plan, plain = arranged(model, machine(gpus(2)), sections), arranged(model, machine())
    assert (plan.why, plan.gpus, plan.gpu_note) == (plain.why, (), "")
    assert plan.config.generate.num_slots == 16 and plan.config.generate.max_slot_tokens == 8192
    assert check_devices(plan, machine(gpus(2))).verdict is Verdict.OK


@pytest.mark.parametrize(
    ("sections", "named"),
    [
        ({"model": {"weights": "int8"}}, "model.weights = int8 needs a CPU: set it to stored"),
        ({"generate": {"residency": "int4"}}, "generate.residency = int4 needs a CPU: set it to device"),
        ({"generate": {"speculation": "infinigen"}}, "generate.speculation = infinigen needs a CPU: set it to auto"),
    ],
)
def test_settings_that_need_a_cpu_keep_auto_there(model: ResolvedModel, sections: dict[str, Any], named: str) -> None:
    plan = arranged(model, machine(gpus(1)), sections)
    assert not plan.config.num_gpus and named in plan.gpu_note
    finding = check_devices(plan, machine(gpus(1)))
    assert finding.verdict is Verdict.WARNING and named in finding.text


def test_emulated_devices_and_clusters_elsewhere_are_left_alone(model: ResolvedModel) -> None:
    for sections in ({"generate": {"device": "emulated"}}, {"ray": {"address": "10.0.0.1:6379"}}):
        assert arranged(model, machine(gpus(4)), sections).config == WrittenConfig(sections).config


def test_different_devices_are_as_configured_and_sizes_follow_the_gpu(model: ResolvedModel) -> None:
    sections = {"prefill": {"device": "cpu"}, "generate": {"device": "cuda"}}
    config = arranged(model, machine(gpus(4, "NVIDIA H200")), sections).config
    assert config.prefill == WrittenConfig(sections).config.prefill
    assert config.num_gpus == 1 and config.generate.num_slots > 16


def test_too_few_gpus_for_both_roles_serve_the_one_that_asks(model: ResolvedModel) -> None:
    sections = {"prefill": {"num_ranks": 2}, "generate": {"device": "cuda"}}
    config = arranged(model, machine(gpus(2)), sections).config
    assert (config.prefill.device, config.num_gpus, config.generate.max_slot_tokens) == ("auto", 1, 51072)


def test_what_is_set_stays(model: ResolvedModel) -> None:
    sections = {"generate": {"num_slots": 5, "max_slot_tokens": 100}, "prefill": {"prefix_share": 0.2}}
    config = arranged(model, machine(gpus(1, "NVIDIA H200")), sections).config
    assert (config.generate.num_slots, config.generate.max_slot_tokens, config.prefill.prefix_share) == (5, 100, 0.2)
    slots_only = arranged(model, machine(gpus(1, "NVIDIA H200")), {"generate": {"num_slots": 5}}).config
    assert (slots_only.generate.num_slots, slots_only.generate.max_slot_tokens) == (5, 131072)


@pytest.mark.parametrize(
    ("section", "num_slots", "max_slot_tokens"),
    [
        ({}, 256, 131072),
        ({"device_memory_bytes": "48GiB"}, 112, 131072),
        ({"kv_memory_bytes": "8GiB"}, 16, 64_000),
        ({"gpu_share": 0.25, "num_groups": 1}, 64, 131072),
        ({"residency": "host"}, 16, 8192),
        ({"kv_memory_bytes": "1GiB"}, 16, 7_424),
        ({"kv_memory_bytes": "270MiB"}, 1, 1_408),
        ({"device_memory_bytes": "1GiB"}, 16, 8192),
    ],
)
def test_sizes_follow_the_memory_that_kv_has(
    model: ResolvedModel, section: dict[str, Any], num_slots: int, max_slot_tokens: int
) -> None:
    """The KV memory holds 2,048 tokens for each slot, and a sequence may fill it alone."""
    found = arranged(model, machine(gpus(2, "NVIDIA H200")), {"prefill": {"num_groups": 0}, "generate": section}).config
    assert found.generate.device == "cuda"
    assert found.generate.num_slots == num_slots
    assert found.generate.max_slot_tokens == pytest.approx(max_slot_tokens, rel=0.05)
    assert found.generate.max_slot_tokens % 64 == 0


def test_slots_are_limited_by_the_time_of_a_step_and_tokens_by_the_model(tmp_path: Path) -> None:
    """KV of a small model fits many times over: its steps on a slow GPU are what limits the slots of a larger one."""
    small = model_of(tmp_path / "small", 300_000_000, max_position_embeddings=4096, num_hidden_layers=2)
    config = arranged(small, machine(gpus(1))).config
    assert (config.generate.num_slots, config.generate.max_slot_tokens) == (256, 4096)
    slow = model_of(tmp_path / "slow", 3_000_000_000)
    assert arranged(slow, machine(gpus(1))).config.generate.num_slots == 16


def test_a_gpu_that_cannot_be_used_is_refused_where_it_is_asked_for(tmp_path: Path) -> None:
    here, large = machine(gpus(1)), model_of(tmp_path / "70b", 70_000_000_000)
    finding = check_devices(arranged(large, here, {"generate": {"device": "cuda"}}), here)
    with pytest.raises(ConfigError, match=r"needs more GPUs \(1\) than can be used \(0\): not used: GPU 0, 22.49 GiB"):
        require([finding])
