"""The profile of a machine's device is measured once, kept, and what predictions begin with."""

import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from baton.modeling.device.cpu import CpuDevice
from baton.modeling.kernels.processor import processor_kind
from baton.planning.device_profile import DeviceProfile, load, nominal_core, nominal_gpu, save
from baton.planning.gpus import gpu_rank
from baton.planning.hardware import CPU_CORE, Hardware, cpu_rank
from baton.planning.model_shape import ModelShape
from baton.settings.place import WorkerPlace
from deploy.machine import device_profile, prefill_rates
from deploy.machine.device_profile import (
    Half,
    cpu_profile,
    gpu_profile,
    keep_profiles,
    kept_path,
    kept_profile,
    main,
    measure,
    measure_in_child,
    must_measure,
    worker_profile,
)
from deploy.machine.planners import cpu_costs
from deploy.machine.resolved_model import ResolvedModel
from tests.support.models.config_folders import SMALL, write_config

pytestmark = pytest.mark.usefixtures("cache")

CORE = replace(CPU_CORE, linear_flops=1e11, pair_flops=5e10, memory_bandwidth=4e9)
PROFILE = DeviceProfile("CPU core", "cpu", CORE, shared_bandwidth=7e9, is_measured=True)
GPU = replace(nominal_gpu("NVIDIA H200", 2), hardware=replace(gpu_rank("NVIDIA H200", 2), issue_s=1e-4))
TINY = ModelShape(2, 64, 2, 2, 32, ffn=64, vocab=64)


@pytest.fixture
def model(tmp_path: Path) -> ResolvedModel:
    return ResolvedModel(write_config(tmp_path / "tiny", SMALL))


@pytest.fixture
def quota(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """A function that sets the CPU quota of the container."""

    def use(cores: float) -> None:
        monkeypatch.setattr(device_profile, "cpu_quota", lambda: cores)

    use(math.inf)
    return use


@pytest.fixture
def threads() -> Iterator[None]:
    """Restore the number of torch's threads after the test."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def keep(profile: DeviceProfile, *, device: str = "cpu", gpu: str = "") -> None:
    for dtype_bytes in (2, 4):
        path = kept_path(device, dtype_bytes, gpu)
        path.parent.mkdir(parents=True, exist_ok=True)
        save(profile, path)


def test_without_a_measurement_rates_are_assumed(quota: Callable[[float], None]) -> None:
    assert kept_profile("cpu", 2) is None
    assert cpu_profile(2, 2).hardware == cpu_rank(2, 2)
    assert cpu_profile(1, 4, "auto").hardware == cpu_rank(1, 4)
    profile = cpu_profile(2, 2)
    assert (profile.name, profile.is_measured) == (f"{processor_kind()}, 2 threads", False)


def test_predictions_begin_with_what_was_kept(model: ResolvedModel, quota: Callable[[float], None]) -> None:
    assumed = cpu_costs(model, "bfloat16", 2)
    keep(PROFILE)
    made = cpu_costs(model, "bfloat16", 2)
    assert made.prefill.linear_s == pytest.approx(assumed.prefill.linear_s * cpu_rank(2, 2).linear_flops / 2e11)
    assert made.prefill.pair_s == pytest.approx(assumed.prefill.pair_s * cpu_rank(2, 2).pair_flops / 1e11)
    assert made.step != assumed.step


def test_predictions_for_a_gpu_begin_with_what_was_kept_for_a_gpu_of_its_name() -> None:
    keep(GPU, device="cuda", gpu="NVIDIA H200")
    rates = [gpu_profile(f"NVIDIA {name}", 2).hardware for name in ("H200", "H100")]
    assert rates == [GPU.hardware, gpu_rank("NVIDIA H100", 2)] and rates[0] != gpu_rank("NVIDIA H200", 2)


def test_threads_share_the_memory() -> None:
    assert [CORE.on_cores(threads, 7e9).memory_bandwidth for threads in (1, 2, 8)] == [4e9, 7e9, 7e9]


def test_a_worker_has_no_more_cores_than_its_containers_quota(quota: Callable[[float], None]) -> None:
    keep(PROFILE)
    whole = cpu_profile(4, 2)
    quota(1.5)
    limited = cpu_profile(4, 2)
    assert (whole.hardware.linear_flops, limited.hardware.linear_flops) == (4e11, 1.5e11)
    assert limited.name == f"{processor_kind()}, 4 threads, quota of 1.5 cores" != whole.name
    assert limited.is_measured and limited.device == "cpu"
    assert 0 < limited.used_bytes < limited.memory_bytes


def test_an_emulated_device_computes_at_the_rates_of_the_cpu(quota: Callable[[float], None]) -> None:
    keep(PROFILE)
    place = WorkerPlace(model_folder=Path("/m"), device="emulated", num_threads=1)
    profile = worker_profile(place)
    assert (profile.device, profile.hardware) == ("emulated", CORE.on_cores(1, 7e9))


def test_a_gpu_is_another_one_by_its_share_and_its_limit_of_mps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", raising=False)
    keep(GPU, device="cuda", gpu="NVIDIA H200")
    whole = gpu_profile("NVIDIA H200", 2)
    shared = gpu_profile("NVIDIA H200", 2, 0.5)
    assert (whole.name, shared.name) == ("NVIDIA H200", "NVIDIA H200, share 0.5")
    assert shared.hardware == whole.hardware == GPU.hardware
    monkeypatch.setenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "25")
    limited = gpu_profile("NVIDIA H200", 2)
    assert limited.name == "NVIDIA H200, 25 % of MPS"
    assert limited.hardware != GPU.hardware, "was measured without the limit"


@pytest.mark.parametrize("text", ["", "{", "{}", '{"kind": "baton-device-profile", "schema": 1, "hardware": {}}'])
def test_damaged_profiles_are_ignored(text: str, caplog: pytest.LogCaptureFixture) -> None:
    keep(PROFILE)
    kept_path("cpu", 2).write_text(text)
    assert kept_profile("cpu", 2) is None and kept_profile("cpu", 4) == PROFILE
    assert "predictions begin with assumed rates" in caplog.text


@pytest.mark.usefixtures("threads")
def test_this_core_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")  # where kernels are built already
    monkeypatch.setattr(device_profile, "_AGREEMENT", 1.0)
    profile = measure("cpu", "bfloat16", 0.0)
    assert profile is not None and profile.is_measured
    core = profile.hardware
    assert core.linear_flops > 1e8 and core.pair_flops > 1e8
    assert 1e8 < core.memory_bandwidth <= profile.shared_bandwidth


def halves(*rates: float) -> Callable[..., Half]:
    """A function that returns halves of measurements with these rates, one after another."""
    found = iter(rates)

    def half() -> Half:
        rate = next(found)
        return [1e9, rate], replace(PROFILE, shared_bandwidth=rate)

    return lambda *_: half()


@pytest.mark.parametrize(
    ("rates", "kept"),
    [
        ((10e9, 9e9), 9e9),
        ((8.1e9, 10e9), 10e9),
        ((10e9, 7.9e9, 6e9, 6e9), 6e9),
        ((7.9e9, 10e9, 6e9, 6e9), 6e9),
        ((10e9, 7e9, 7e9, 10e9), None),
    ],
)
def test_halves_that_differ_are_measured_again_and_then_not_kept(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, rates: tuple[float, ...], kept: float | None
) -> None:
    monkeypatch.setattr(device_profile, "_core_half", halves(*rates))
    assert keep_profiles("cpu", ["bfloat16"]) == ([] if kept is None else ["bfloat16"])
    found = kept_profile("cpu", 2)
    assert (None if found is None else found.shared_bandwidth) == kept
    assert ("differ by over 20 %: free the machine" in caplog.text) == (kept is None)


@pytest.mark.parametrize("rates", [(5, 5), (1, 2, 5, 5), (1, 2, 1, 2, 5, 5), (1, 2, 1, 2, 1, 2)])
def test_progress_is_the_number_of_halves(monkeypatch: pytest.MonkeyPatch, rates: tuple[float, ...]) -> None:
    monkeypatch.setattr(device_profile, "_core_half", halves(*rates))
    monkeypatch.setattr(device_profile, "NUM_HALVES", 6)
    steps: list[int] = []
    profile = measure("cpu", "bfloat16", 0.0, done=steps.append)
    assert (profile is None) == (rates[-1] == 2) and sum(steps) == 6


def test_a_failed_measurement_is_repeated_an_hour_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_profile, "_core_half", halves(1e9, 2e9, 1e9, 2e9, 5e9, 5e9))
    assert must_measure("cpu", 2)
    assert not keep_profiles("cpu", ["bfloat16"]) and not must_measure("cpu", 2) and must_measure("cpu", 4)
    assert not keep_profiles("cpu", ["bfloat16"]), "measures nothing"
    tried = kept_path("cpu", 2).with_suffix(".tried")
    os.utime(tried, (tried.stat().st_atime, tried.stat().st_mtime - 3601))
    assert must_measure("cpu", 2) and keep_profiles("cpu", ["bfloat16"])
    assert not must_measure("cpu", 2)


def test_a_measurement_that_an_error_ends_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_profile, "_core_half", halves())
    with pytest.raises(StopIteration):
        keep_profiles("cpu", ["bfloat16"])
    assert not must_measure("cpu", 2)


def test_what_is_kept_is_not_measured_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(device_profile, "_core_half", halves(5e9, 5e9, 6e9, 6e9))
    assert keep_profiles("cpu", ["bfloat16"])
    assert not main([]), "measures the other dtype"
    assert [load(kept_path("cpu", dtype_bytes)).shared_bandwidth for dtype_bytes in (2, 4)] == [5e9, 6e9]
    assert not main(["--dtype", "float32"])
    *_, last = capsys.readouterr().out.splitlines()
    assert last == "float32: CPU core: 100 GFLOP/s in matrices, 50 in attention, reads 4 GB/s (measured)"


FORMER = '{"kind": "baton-device-profile", "schema": 1, "name": "CPU core", "device": "cpu"}'


@pytest.mark.parametrize("text", [FORMER, "{half"], ids=["of a former version", "damaged"])
def test_a_file_that_cannot_be_read_is_measured_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    path = kept_path("cpu", 2)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    monkeypatch.setattr(device_profile, "_core_half", halves(1e9, 2e9, 1e9, 2e9, 5e9, 5e9))
    assert must_measure("cpu", 2) and str(path) in caplog.text
    assert not keep_profiles("cpu", ["bfloat16"]) and not must_measure("cpu", 2)
    path.with_suffix(".tried").unlink()
    assert keep_profiles("cpu", ["bfloat16"])
    found = kept_profile("cpu", 2)
    assert found is not None and found.shared_bandwidth == 5e9


def test_a_measurement_that_is_not_kept_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(device_profile, "_core_half", halves(1e9, 2e9, 1e9, 2e9))
    assert main(["--dtype", "bfloat16"]) == 1
    assert capsys.readouterr().out == "bfloat16: not kept\n"


def test_a_core_has_its_part_of_what_all_reach_and_half_of_what_it_reaches_alone_at_least(
    monkeypatch: pytest.MonkeyPatch, quota: Callable[[float], None]
) -> None:
    alone, together = [10e9, 10e9, 5e9], [16e9, 4e9, 8e9]
    found = iter([*alone, *together] * 2)
    monkeypatch.setattr(prefill_rates, "rate_of", lambda *_: next(found))
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    profile = measure("cpu", "float32", 0.0)
    assert profile is not None
    rates = profile.hardware
    assert (rates.linear_flops, rates.pair_flops, rates.memory_bandwidth) == (8e9, 5e9, 5e9)
    assert profile.shared_bandwidth == 8e9


def test_a_gpus_rates_and_launches_are_measured_and_copies_limit_its_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, with small sizes, and with rates that are given."""
    found = iter([7e14, 4e14, 4e12, 2500.0, 1e9] * 2)
    monkeypatch.setattr(prefill_rates, "rate_of", lambda *_: next(found))
    monkeypatch.setattr(prefill_rates, "copy_work", lambda device: (lambda: None, 1))
    monkeypatch.setattr("baton.modeling.device.making.make_device", lambda name: CpuDevice())
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    for name in ("_GPU_SHAPE", "_TINY_SHAPE"):
        monkeypatch.setattr(device_profile, name, TINY)
    for name, size in (("_GPU_TOKENS", 4), ("_GPU_PROMPT", (8, 8)), ("_GPU_DECODES", (1, 64))):
        monkeypatch.setattr(device_profile, name, size)
    profile = measure("cuda", "bfloat16", 0.0)
    nominal = gpu_rank("NVIDIA H200", 2)
    link = replace(nominal.link, bandwidth=1e9)
    rates = Hardware(7e14, 4e14, link, memory_bandwidth=4e12, fixed_s=nominal.fixed_s, issue_s=1 / 2500)
    assert profile == DeviceProfile("NVIDIA H200", "cuda", rates, 4e12, is_measured=True)


def test_a_worker_on_a_gpu_measures_what_is_not_kept_and_reports_the_gpus_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[str, str]] = []

    def measured(device: str, dtype: str) -> None:
        asked.append((device, dtype))
        keep(GPU, device="cuda", gpu="NVIDIA H200")

    monkeypatch.setattr(device_profile, "measure_in_child", measured)
    monkeypatch.setattr("baton.modeling.device.making.require_cuda", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (100 << 30, 140 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 10 << 30)
    place = WorkerPlace(model_folder=Path("/m"), device="cuda", gpu_share=0.5)
    first, second = worker_profile(place), worker_profile(place)
    assert asked == [("cuda", "bfloat16")]
    assert first == second == replace(GPU, name="NVIDIA H200, share 0.5", memory_bytes=140 << 30, used_bytes=30 << 30)


def test_a_measurement_that_fails_is_told_of(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    commands: list[Sequence[str]] = []

    class Run:
        returncode, stderr = 1, "Traceback\nRuntimeError: out of memory\n"

    def run(command: Sequence[str], **_: object) -> Run:
        commands.append(command)
        return Run()

    monkeypatch.setattr("subprocess.run", run)
    measure_in_child("cuda", "float32")
    arguments = ["-m", "deploy.machine.device_profile", "--device", "cuda", "--dtype", "float32"]
    assert commands == [[sys.executable, *arguments]]
    assert "cuda: nominal rates are used, because the device could not be measured: RuntimeError: out" in caplog.text


def test_a_nominal_core_is_that_of_an_assumed_rank() -> None:
    core = nominal_core(4)
    assert core.hardware.on_cores(3, core.shared_bandwidth) == cpu_rank(3, 4)
