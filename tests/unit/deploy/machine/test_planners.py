"""A cluster's planner begins with costs that follow from the model's shape and the rates of the workers' devices."""

from pathlib import Path

import pytest

from baton.settings.place import WorkerPlace
from deploy.config.cluster import ClusterConfig
from deploy.config.file import WrittenConfig
from deploy.config.sections import GenerateSection, PrefillSection
from deploy.machine import planners
from deploy.machine.cluster_plan import ClusterPlan
from deploy.machine.device_profile import worker_profile
from deploy.machine.planners import cpu_costs, served_planner, worker_profiles
from deploy.machine.resolved_model import ResolvedModel
from tests.support.models.config_folders import write_config


@pytest.fixture
def model(cache: Path, tmp_path: Path) -> ResolvedModel:
    return ResolvedModel(write_config(tmp_path / "tiny"))


def test_costs_follow_from_the_shape(model: ResolvedModel) -> None:
    costs = cpu_costs(model, "float32", 1)
    assert (costs.shape.num_layers, costs.shape.vocab, costs.shape.gated) == (2, 97, True)
    assert costs.prefill.kv_bytes == 2 * 2 * 16 * 4
    assert cpu_costs(model, "float32", 2).prefill.linear_s == pytest.approx(costs.prefill.linear_s / 2)


def test_int8_weights_are_taken_to_be_read_as_such(model: ResolvedModel) -> None:
    plain, int8 = (cpu_costs(model, "bfloat16", 1, each) for each in ("none", "int8"))
    assert int8.step.step_s == pytest.approx(plain.step.step_s / 2)
    config = WrittenConfig({"model": {"weights": "int8"}}).local.config
    assert served_planner(ClusterPlan(config, model)).nominal.bytes_per_weight == 1


def test_planners_reach_as_far_as_their_clusters(model: ResolvedModel) -> None:
    planner = served_planner(ClusterPlan(ClusterConfig(prefill=PrefillSection(num_ranks=3, num_threads=2)), model))
    assert (planner.max_ranks, planner.max_tokens) == (3, 512)
    local = served_planner(ClusterPlan(WrittenConfig({"generate": {"max_slot_tokens": 100}}).local.config, model))
    assert (local.max_ranks, local.max_tokens) == (2, 100)


def test_planners_know_their_engines_steps(model: ResolvedModel) -> None:
    config = ClusterConfig(prefill=PrefillSection(num_threads=1), generate=GenerateSection(num_threads=2))
    planner = served_planner(ClusterPlan(config, model))
    assert planner.nominal.prefill == cpu_costs(model, "bfloat16", 1).prefill
    assert planner.nominal.step == cpu_costs(model, "bfloat16", 2).step
    assert planner.local is not None and planner.local.speed == pytest.approx(2)


def test_workers_on_a_gpu_are_predicted_by_its_rates(model: ResolvedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each role has its own device, which is a known GPU or the one that is assumed."""
    monkeypatch.setattr(planners, "gpu_name", lambda: "NVIDIA H200")
    ranks, engines = PrefillSection(num_threads=1), GenerateSection(num_threads=1)
    gpu_ranks, gpu_engines = PrefillSection(num_threads=1, device="cuda"), GenerateSection(device="cuda")
    for prefill, generate, speeds in (
        (ranks, gpu_engines, (1.1, 1e5)),  # of a model so small that launches take most of the time
        (gpu_ranks, engines, (1e-5, 0.9)),
        (gpu_ranks, gpu_engines, (1, 1)),
    ):
        plan = ClusterPlan(ClusterConfig(prefill=prefill, generate=generate), model)
        planner, profiles = served_planner(plan), worker_profiles(plan)
        on_cpu = cpu_costs(model, "bfloat16", 1)
        for nominal, cpu, profile in zip(
            (planner.nominal.prefill.linear_s, planner.nominal.step.token_s),
            (on_cpu.prefill.linear_s, on_cpu.step.token_s),
            profiles,
            strict=True,
        ):
            assert nominal < cpu / 100 if profile.device == "cuda" else nominal == cpu
        assert planner.local is not None and speeds[0] <= planner.local.speed <= speeds[1]
        assert planner.devices == {profile.name for profile in profiles}
    monkeypatch.setattr(planners, "gpu_name", lambda: "")
    rank, _ = worker_profiles(ClusterPlan(ClusterConfig(prefill=gpu_ranks, generate=engines), model))
    assert rank.name.startswith("unknown GPU, taken for L4")


def test_planners_know_the_devices_of_their_own_workers(model: ResolvedModel) -> None:
    """Their names are those that the workers report."""
    config = ClusterConfig(prefill=PrefillSection(num_threads=1), generate=GenerateSection(num_threads=2))
    place = WorkerPlace(model_folder=model.folder)
    workers = [worker for name in config.group_sizes for worker in config.workers(name, place)]
    names = {worker_profile(worker.place).name for worker in workers}
    assert served_planner(ClusterPlan(config, model)).devices == names and len(names) == 2
