"""What the configuration leaves open follows the machine; what is set stays."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from baton.errors import ConfigError
from baton.planning.device_profile import DeviceProfile, save
from baton.planning.hardware import CPU_CORE
from deploy.config.cluster import ClusterConfig
from deploy.config.file import WrittenConfig
from deploy.machine.arrangement import arrange
from deploy.machine.device_profile import kept_path
from deploy.machine.resolved_model import ResolvedModel
from deploy.machine.this_machine import Machine
from tests.support.models.config_folders import SMALL, write_config
from tests.support.sysfs import flat_nodes

CORE = replace(CPU_CORE, linear_flops=2e11, pair_flops=1.6e11, memory_bandwidth=1e10)
SHARED, SCALING = 1e10, 8e10


def keep(shared_bandwidth: float) -> None:
    """Keep a profile of this machine's cores, which together have this memory bandwidth."""
    for dtype_bytes in (2, 4):
        path = kept_path("cpu", dtype_bytes)
        path.parent.mkdir(parents=True, exist_ok=True)
        save(DeviceProfile("CPU core", "cpu", CORE, shared_bandwidth, is_measured=True), path)


@pytest.fixture
def model(cache: Path, tmp_path: Path) -> ResolvedModel:
    """Of a model, on a machine whose cores share one core's bandwidth."""
    keep(SHARED)
    made = write_config(tmp_path / "tiny", SMALL)
    save_file({"weight": torch.zeros(8)}, made / "model.safetensors")
    return ResolvedModel(made)


def machine(num_cores: int, available_bytes: int = 2**40) -> Machine:
    return Machine(flat_nodes(num_cores), available_bytes, 2**30, None)


def arranged(sections: dict[str, Any], model: ResolvedModel, machine: Machine) -> tuple[ClusterConfig, str]:
    plan = arrange(WrittenConfig(sections), model, machine)
    return plan.config, plan.why


def test_two_cores_are_one_engine_s(model: ResolvedModel) -> None:
    keep(SCALING)
    config, why = arranged({}, model, machine(2))
    assert config.prefill.num_groups == 0 and config.generate.num_threads == 2
    assert not config.generate.cores
    assert why.startswith("2 cores: 1 engine of 2 threads (") and "rather than 1 chain of 1 rank" in why


def test_workers_of_many_cores_have_their_own(model: ResolvedModel) -> None:
    config, why = arranged({}, model, machine(8))
    ranks, engine = config.prefill.cores, config.generate.cores
    assert why.startswith("8 cores: 1 chain of ")
    assert len(ranks) == config.prefill.num_ranks and len(engine[0]) == config.generate.num_threads
    assert sorted(core for each in (*ranks, *engine) for core in each) == list(range(8))
    assert config.generate.step_budget_s == 0, "a chain prefills: streams are not to wait for it"


def test_memory_for_one_worker_is_an_engine_s(model: ResolvedModel) -> None:
    config, _ = arranged({}, model, machine(8, available_bytes=2**30))
    assert config.prefill.num_groups == 0


@pytest.mark.parametrize(
    "sections",
    [
        {"prefill": {"num_ranks": 1}},
        {"generate": {"num_threads": 1}},
        {"arrangement": "configured"},
        {"ray": {"address": "127.0.0.1:6379"}},
        {"orchestrator": {"disaggregation": "always"}},
        {"autoscaling": {"mode": "advise"}},
    ],
)
def test_what_is_configured_is_not_rearranged(model: ResolvedModel, sections: dict[str, Any]) -> None:
    config, why = arranged(sections, model, machine(2))
    assert config == WrittenConfig(sections).config and not why


def test_other_settings_stay_beside(model: ResolvedModel) -> None:
    config, _ = arranged({"generate": {"num_slots": 5}, "prefill": {"prefix_share": 0.2}}, model, machine(2))
    assert config.generate.num_slots == 5 and config.prefill.prefix_share == 0.2


def test_an_engine_that_prefills_alone_takes_longer_steps(model: ResolvedModel) -> None:
    keep(SCALING)
    chosen, _ = arranged({}, model, machine(2))
    asked, why = arranged({"prefill": {"num_groups": 0}, "generate": {"step_budget_s": 0.05}}, model, machine(2))
    assert (chosen.generate.step_budget_s, chosen.generate.max_batched_tokens) == (0.3, 512)
    assert (asked.generate.step_budget_s, asked.generate.max_batched_tokens) == (0.05, 512)
    assert not why
    on_gpu, _ = arranged({"prefill": {"num_groups": 0}, "generate": {"device": "cuda"}}, model, machine(2))
    assert (on_gpu.generate.step_budget_s, on_gpu.generate.max_batched_tokens) == (0.3, 2048)


def test_a_bad_value_is_refused(model: ResolvedModel) -> None:
    with pytest.raises(ConfigError, match="num_slots"):
        arranged({"generate": {"num_slots": 0}}, model, machine(2))
