"""There is always a calibration: a given one, else the kept one, else one by nominal rates."""

import dataclasses
from pathlib import Path

import pytest

from baton.errors import ConfigError
from baton.planning import step_times
from baton.planning.calibration import Calibration, save
from baton.planning.fit import RankRow
from baton.planning.step_times import StepTimes, path_beside, tabulate
from baton.settings.place import WorkerPlace
from deploy.config.cluster import ClusterConfig
from deploy.config.file import WrittenConfig
from deploy.config.sections import GenerateSection, PrefillSection
from deploy.machine import calibrations
from deploy.machine.calibrations import (
    calibration_path,
    find_calibration,
    find_step_times,
    kept_path,
    nominal_calibration,
    nominal_step_times,
    served_calibration,
    served_planner,
    served_step_times_path,
)
from deploy.machine.cluster_plan import ClusterPlan
from deploy.machine.device_profile import worker_profile
from deploy.machine.resolved_model import ResolvedModel
from tests.support.models.config_folders import write_config


@pytest.fixture
def model(cache: Path, tmp_path: Path) -> ResolvedModel:
    return ResolvedModel(write_config(tmp_path / "tiny"))


def measured(assumed: Calibration, path: Path) -> Calibration:
    """Another one of the same model and hardware, written there."""
    made = dataclasses.replace(assumed, rank_rows=(RankRow(10, 0, True, 1.0),))
    path.parent.mkdir(parents=True, exist_ok=True)
    save(made, path)
    return made


def test_without_a_measurement_the_shape_and_nominal_rates_count(model: ResolvedModel) -> None:
    assumed = nominal_calibration(model, "float32", 1)
    assert find_calibration(assumed, "") is assumed and not assumed.is_measured
    assert (assumed.shape.num_layers, assumed.shape.vocab, assumed.shape.gated) == (2, 97, True)
    assert assumed.cost.kv_bytes == 2 * 2 * 16 * 4
    fingerprints = {
        nominal_calibration(model, dtype, threads, quantization).fingerprint
        for dtype in ("float32", "bfloat16")
        for threads in (1, 2)
        for quantization in ("none", "int8")
    }
    assert len(fingerprints) == 8


def test_what_is_kept_is_found_and_what_is_given_goes_first(model: ResolvedModel, tmp_path: Path) -> None:
    assumed = nominal_calibration(model, "float32", 1)
    kept = measured(assumed, kept_path(assumed))
    assert find_calibration(assumed, "") == kept
    given = tmp_path / "given.json"
    other = measured(dataclasses.replace(kept, link_points=((1.0, 1.0),)), given)
    assert find_calibration(assumed, str(given)) == other
    assert calibration_path(assumed, "") == kept_path(assumed)
    assert calibration_path(assumed, str(given)) == given


def test_a_kept_file_that_is_damaged_is_not_used_and_the_log_says_so(
    model: ResolvedModel, caplog: pytest.LogCaptureFixture
) -> None:
    assumed = nominal_calibration(model, "float32", 1)
    path = kept_path(assumed)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text('{"kind": "baton-calibration", "schema"')
    assert find_calibration(assumed, "") is assumed
    assert str(path) in caplog.text
    with pytest.raises(ConfigError, match=path.name):
        find_calibration(assumed, str(path))


def test_a_file_that_is_missing_or_of_another_machine_is_refused(model: ResolvedModel, tmp_path: Path) -> None:
    assumed = nominal_calibration(model, "float32", 1)
    with pytest.raises(ConfigError, match=r"none\.json: cannot be read"):
        find_calibration(assumed, str(tmp_path / "none.json"))
    given = tmp_path / "given.json"
    measured(dataclasses.replace(assumed, hardware="an abacus"), given)
    with pytest.raises(ConfigError, match="calibrated for tiny on an abacus, and this is tiny on .*: run `baton cal"):
        find_calibration(assumed, str(given))


def test_planners_reach_as_far_as_their_clusters(model: ResolvedModel, tmp_path: Path) -> None:
    given = tmp_path / "given.json"
    made = measured(nominal_calibration(model, "bfloat16", 2), given)
    prefill = PrefillSection(num_ranks=3, num_threads=2, calibration=str(given))
    config = ClusterConfig(prefill=prefill)
    assert served_calibration(ClusterPlan(config, model)) == made
    planner = served_planner(ClusterPlan(config, model))
    assert (planner.max_ranks, planner.max_tokens, planner.calibration) == (3, 512, made)
    local = served_planner(ClusterPlan(WrittenConfig({"generate": {"max_slot_tokens": 100}}).local.config, model))
    assert (local.max_ranks, local.max_tokens, local.calibration.is_measured) == (2, 100, False)


def test_a_next_life_searches_partitions_only_for_another_calibration(model: ResolvedModel, tmp_path: Path) -> None:
    given = tmp_path / "given.json"
    made = measured(nominal_calibration(model, "bfloat16", 1), given)
    config = ClusterConfig(prefill=PrefillSection(num_ranks=2, num_threads=1, calibration=str(given)))
    planner = served_planner(ClusterPlan(config, model))
    assert served_planner(ClusterPlan(config, model), planner) is planner
    other = measured(dataclasses.replace(made, link_points=((1.0, 2.0),)), given)
    following = served_planner(ClusterPlan(config, model), planner)
    assert following is not planner and following.calibration == other


def tabulated(assumed: StepTimes, path: Path) -> StepTimes:
    """A table of the same model and engine, written there."""
    made, _ = tabulate(assumed, (1, 4), (64, 256), ((0.01, 0.02), (0.02, 0.05)))
    path.parent.mkdir(parents=True, exist_ok=True)
    step_times.save(made, path)
    return made


def test_step_times_lie_beside_the_calibration(model: ResolvedModel, tmp_path: Path) -> None:
    assumed = nominal_step_times(model, "float32", 1, residency="device")
    assert not assumed.is_measured and assumed.step_s(2, 100) > 0
    kept = kept_path(nominal_calibration(model, "float32", 1))
    assert find_step_times(assumed, kept) is assumed
    made = tabulated(assumed, path_beside(kept, assumed))
    assert find_step_times(assumed, kept) == made
    others = [
        nominal_step_times(model, "float32", 2, residency="device"),
        nominal_step_times(model, "bfloat16", 1, residency="device"),
        nominal_step_times(model, "float32", 1, residency="host"),
        nominal_step_times(model, "float32", 1, residency="device", quantization="int8"),
    ]
    assert len({assumed.fingerprint, *(other.fingerprint for other in others)}) == 5
    assert find_step_times(others[0], kept) is others[0]


def test_int8_weights_are_taken_to_be_read_as_such(model: ResolvedModel) -> None:
    plain, int8 = (
        nominal_step_times(model, "bfloat16", 1, residency="device", quantization=each) for each in ("none", "int8")
    )
    assert int8.cost.step_s == pytest.approx(plain.cost.step_s / 2)


def test_step_times_that_are_damaged_or_foreign_are_not_used(
    model: ResolvedModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assumed, kept = nominal_step_times(model, "float32", 1, residency="device"), tmp_path / "kept.json"
    path = path_beside(kept, assumed)
    path.write_text("{")
    assert find_step_times(assumed, kept) is assumed and str(path) in caplog.text
    caplog.clear()
    tabulated(dataclasses.replace(assumed, hardware="an abacus"), path)
    assert find_step_times(assumed, kept) is assumed and "of another model or hardware" in caplog.text


def test_engines_know_where_their_step_times_are_kept(model: ResolvedModel, tmp_path: Path) -> None:
    """Measured or not yet: they read them when they start."""
    given = tmp_path / "given.json"
    measured(nominal_calibration(model, "bfloat16", 1), given)
    prefill = PrefillSection(num_threads=1, calibration=str(given))
    config = ClusterConfig(prefill=prefill, generate=GenerateSection(num_threads=2))
    assumed = nominal_step_times(model, "bfloat16", 2, residency="device")
    path = served_step_times_path(ClusterPlan(config, model))
    assert path == path_beside(given, assumed)
    place = WorkerPlace(model_folder=model.folder, step_times=str(path))
    workers = [worker for name in config.group_sizes for worker in config.workers(name, place)]
    places = {worker.role: worker.place.step_times for worker in workers}
    assert places == {"prefill": "", "generate": str(path_beside(given, assumed))}


def test_planners_know_their_engines_steps(model: ResolvedModel, tmp_path: Path) -> None:
    given = tmp_path / "given.json"
    measured(nominal_calibration(model, "bfloat16", 1), given)
    config = ClusterConfig(
        prefill=PrefillSection(num_threads=1, calibration=str(given)), generate=GenerateSection(num_threads=2)
    )
    assumed = nominal_step_times(model, "bfloat16", 2, residency="device")
    planner = served_planner(ClusterPlan(config, model))
    assert planner.steps == assumed
    made = tabulated(assumed, path_beside(given, assumed))
    assert served_planner(ClusterPlan(config, model), planner) is planner
    assert planner.step_s(4, 256) == pytest.approx(0.05) and planner.steps == made
    local = WrittenConfig({"generate": {"num_threads": 2}}).local.config
    assert served_planner(ClusterPlan(local, model)).steps == assumed
    tabulated(assumed, path_beside(kept_path(nominal_calibration(model, "bfloat16", 1)), assumed))
    assert served_planner(ClusterPlan(local, model)).steps == made


def test_workers_on_a_gpu_are_predicted_by_its_rates(model: ResolvedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each role by its own device, in files of its own, and by a known GPU or by the one that is assumed."""
    monkeypatch.setattr(calibrations, "gpu_name", lambda: "NVIDIA H200")
    on_cpu, on_gpu = (nominal_calibration(model, "bfloat16", 1, device=device) for device in ("cpu", "cuda"))
    assert "NVIDIA H200, cuda" in on_gpu.hardware and on_gpu.fingerprint != on_cpu.fingerprint
    assert on_gpu.cost.linear_s < on_cpu.cost.linear_s / 100
    ranks, engines = PrefillSection(num_threads=1), GenerateSection(num_threads=1)
    gpu_ranks, gpu_engines = PrefillSection(num_threads=1, device="cuda"), GenerateSection(device="cuda")
    for prefill, generate, calibration, speeds in (
        (ranks, gpu_engines, on_cpu, (1.1, 1e5)),  # of a model so small that launches take most of the time
        (gpu_ranks, engines, on_gpu, (1e-5, 0.9)),
        (gpu_ranks, gpu_engines, on_gpu, (1, 1)),
    ):
        planner = served_planner(ClusterPlan(ClusterConfig(prefill=prefill, generate=generate), model))
        assert planner.calibration == calibration and planner.local is not None
        assert speeds[0] <= planner.local.speed <= speeds[1]
    monkeypatch.setattr(calibrations, "gpu_name", lambda: "")
    assert "unknown GPU" in nominal_calibration(model, "bfloat16", 1, device="cuda").hardware


def test_planners_know_the_devices_of_their_own_workers(model: ResolvedModel) -> None:
    """By the names that the workers report."""
    config = ClusterConfig(prefill=PrefillSection(num_threads=1), generate=GenerateSection(num_threads=2))
    place = WorkerPlace(model_folder=model.folder)
    workers = [worker for name in config.group_sizes for worker in config.workers(name, place)]
    names = {worker_profile(worker.place).name for worker in workers}
    assert served_planner(ClusterPlan(config, model)).devices == names and len(names) == 2
