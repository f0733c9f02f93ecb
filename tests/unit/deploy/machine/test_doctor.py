"""The doctor sees what would keep a cluster from running, and says what would help."""

import json
import re
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from baton.errors import ConfigError
from baton.modeling.kernels.process_kernels import KERNELS
from baton.planning.model_shape import ModelShape
from deploy.config.cluster import ClusterConfig
from deploy.config.file import load_config
from deploy.machine.cluster_plan import CUDA_WORKER_BYTES, WORKER_BYTES, ClusterPlan
from deploy.machine.doctor import (
    Finding,
    Verdict,
    check_cores,
    check_devices,
    check_instruction_set,
    check_memory,
    check_model,
    check_port,
    check_selection,
    check_shm,
    examine,
    measure_kernels,
    measure_rates,
    report_profile,
    require,
)
from deploy.machine.probe import MeasuredRates, measure
from deploy.machine.resolved_model import ResolvedModel
from deploy.machine.this_machine import GpuState, Machine, inspect_machine
from tests.support.models.letter_models import write_letter_model
from tests.support.sysfs import flat_nodes
from tests.support.tools import has_ipv6

pytestmark = pytest.mark.integration

MACHINE = Machine(flat_nodes(2), available_bytes=64 * 2**30, shm_bytes=2**30, instruction_set="x86-64-v3")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model of 6 weights, whole as far as files go."""
    save_file({"a": np.zeros((2, 2), np.float16), "b": np.zeros(2, np.float32)}, tmp_path / "model.safetensors")
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    return tmp_path


def plan_of(folder: Path, config: ClusterConfig | None = None) -> ClusterPlan:
    """Of the model in that folder; None: with the default configuration."""
    return ClusterPlan(config or load_config(None), ResolvedModel(folder))


def check(finding: Finding, verdict: Verdict, text: str = "") -> None:
    assert finding.verdict is verdict and text in finding.text, finding


def test_a_model_that_lacks_files_fails(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    check(check_model(plan_of(folder)), Verdict.FAILED, "lacks tokenizer.json")


def test_format_of_quantised_weights_is_shown_and_one_that_cannot_be_read_fails(folder: Path) -> None:
    settings = {"quant_method": "awq", "bits": 4, "group_size": 128}
    (folder / "config.json").write_text(json.dumps({"quantization_config": settings}))
    assert "as bfloat16, dequantised from awq, 4 bits, groups of 128" in check_model(plan_of(folder)).text
    (folder / "config.json").write_text(json.dumps({"quantization_config": {**settings, "bits": 3}}))
    finding = check_model(plan_of(folder))
    check(finding, Verdict.FAILED, "quantization_config: bits: 3 is not supported; choose AWQ")
    assert "model.name: " in finding.text


def test_a_model_that_drafts_must_be_whole_and_takes_memory(folder: Path, tmp_path: Path) -> None:
    drafts = tmp_path / "drafts"
    drafts.mkdir()
    save_file({"a": np.zeros(2**20, np.float16)}, drafts / "model.safetensors")
    (drafts / "config.json").write_text("{}")
    config = load_config(None, ["generate.speculation=model", f"generate.draft_model={drafts}"])
    lack = f"{drafts} lacks tokenizer.json: set generate.draft_model to a whole model"
    check(check_model(plan_of(folder, config)), Verdict.FAILED, lack)
    (drafts / "tokenizer.json").write_text("{}")
    assert f"drafts by {drafts}" in check_model(plan_of(folder, config)).text
    needed = config.num_workers * (ResolvedModel(folder).weight_bytes("bfloat16") + WORKER_BYTES)
    machine = replace(MACHINE, available_bytes=needed + 2**20)
    check(check_memory(plan_of(folder, config), machine), Verdict.FAILED)
    check(check_memory(plan_of(folder), machine), Verdict.OK)


def test_devices_are_listed_with_what_each_role_would_use(folder: Path) -> None:
    settings = ["generate.device=emulated", "device.link=4GBps", "device.link_latency_s=1e-5"]
    found = check_devices(plan_of(folder, load_config(None, settings)), MACHINE)
    assert found.verdict is Verdict.OK
    assert found.text.startswith(
        "prefill on cpu, generate on emulated (link 4 GB/s, 10 us) with 16 slots of at most 8192 tokens; "
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("role", ["prefill", "generate"])
def test_a_device_that_is_not_there_is_named_with_its_role(role: str, folder: Path) -> None:
    found = check_devices(plan_of(folder, load_config(None, [f"{role}.device=cuda"])), MACHINE)
    assert (found.verdict, "\n" in found.text) == (Verdict.FAILED, False)
    assert found.text.startswith(f"{role}.device = cuda is not available: ")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_torch_without_cuda_fails_where_gpus_are_asked_for(folder: Path) -> None:
    gpu = GpuState(0, "NVIDIA L4", 2**34, 2**34, "GPU-a")
    plan = replace(plan_of(folder, load_config(None, ["generate.device=cuda"])), gpus=(gpu,))
    with_gpu = replace(MACHINE, gpus=(gpu,))
    used = "prefill on cpu, generate on cuda with 16 slots of at most 8192 tokens; GPU 0: NVIDIA L4, 16.0 GiB"
    check(check_devices(plan, with_gpu), Verdict.OK, used)
    why = "generate.device = cuda is not available: this torch is built without CUDA"
    check(check_devices(plan, replace(with_gpu, has_cuda=False)), Verdict.FAILED, why)


def test_weights_and_kv_on_gpus_take_none_of_the_host_s_memory(folder: Path) -> None:
    """Only the processes do, unless KV is kept on the host."""
    values = ["prefill.num_ranks=1", "generate.device=cuda", "generate.kv_memory_bytes=60GiB"]
    host = replace(MACHINE, available_bytes=CUDA_WORKER_BYTES + WORKER_BYTES + 2**20)
    plan = plan_of(folder, load_config(None, values))
    check(check_memory(plan, host), Verdict.OK, "2.5 GiB for 2 workers")
    check(check_memory(plan, replace(host, available_bytes=CUDA_WORKER_BYTES)), Verdict.FAILED)
    kept_on_host = plan_of(folder, load_config(None, [*values, "generate.residency=host"]))
    check(check_memory(kept_on_host, host), Verdict.WARNING, "60.0 GiB for KV")


def test_memory_for_all_groups_that_may_be_started_is_looked_at(folder: Path) -> None:
    config = load_config(None, ["autoscaling.mode=act", "autoscaling.max=6", "prefill.num_ranks=2"])
    worker = ResolvedModel(folder).weight_bytes("bfloat16") + WORKER_BYTES
    scarce, enough = (replace(MACHINE, available_bytes=number * worker) for number in (10, 11))
    may_start = "the autoscaler may start 11: lower autoscaling.max"
    check(check_memory(plan_of(folder, config), scarce), Verdict.WARNING, may_start)
    check(check_memory(plan_of(folder, config), enough), Verdict.OK)


@pytest.mark.parametrize("field", ["residency", "speculation"])
def test_keys_cannot_be_chosen_by_what_nobody_prepared(field: str, cache: Path) -> None:
    plain, sparse = load_config(None, []), load_config(None, [f"generate.{field}=infinigen"])
    check(check_selection(plain), Verdict.OK)
    check(check_selection(sparse), Verdict.FAILED, "run `baton prepare` with this model")
    check(check_selection(sparse), Verdict.FAILED, f"{field} infinigen chooses keys")
    path = cache / "baton" / "selections" / "some.safetensors"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"")
    check(check_selection(sparse), Verdict.OK)
    named = load_config(None, [f"generate.{field}=infinigen", f"generate.selection_file={path}"])
    check(check_selection(named), Verdict.OK)
    path.unlink()
    check(check_selection(named), Verdict.FAILED, f"{path} is not a file: set generate.selection_file")


def test_a_pinned_core_that_is_absent_fails() -> None:
    check(check_cores(load_config(None, ["orchestrator.cores=[0, 7]"]), MACHINE), Verdict.FAILED, "[7]")


def test_more_workers_than_cores_is_a_warning_only() -> None:
    check(check_cores(load_config(None), MACHINE), Verdict.WARNING)
    check(check_cores(load_config(None, ["prefill.num_ranks=1"]), MACHINE), Verdict.OK)


def test_workers_that_do_not_fit_into_memory_fail(folder: Path) -> None:
    config = load_config(None, ["prefill.num_ranks=3"])
    check(check_memory(plan_of(folder, config), MACHINE), Verdict.OK)
    check(
        check_memory(plan_of(folder, config), replace(MACHINE, available_bytes=2**30)),
        Verdict.FAILED,
        "2.0 GiB for 4 workers",
    )


def test_kv_that_does_not_fit_beside_the_weights_is_a_warning(folder: Path) -> None:
    values = ["prefill.num_ranks=1", "generate.num_groups=2", "generate.kv_memory_bytes=4GiB"]
    short = replace(MACHINE, available_bytes=9 * 2**30)
    config = load_config(None, values)
    check(check_memory(plan_of(folder, load_config(None, values[:2])), short), Verdict.OK)
    check(
        check_memory(plan_of(folder, config), short), Verdict.WARNING, "8.0 GiB for KV: lower generate.kv_memory_bytes"
    )
    check(check_memory(plan_of(folder, config), MACHINE), Verdict.OK)


@pytest.mark.usefixtures("cache")
def test_the_profile_of_the_engines_device_is_told(folder: Path) -> None:
    threads = plan_of(folder, load_config(None, ["generate.num_threads=3"]))
    check(report_profile(threads), Verdict.OK, ", 3 threads")
    check(report_profile(plan_of(folder, load_config(None, []))), Verdict.OK, "in attention, reads 10 GB/s (nominal)")


def test_a_gpu_is_told_by_its_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deploy.machine.planners.gpu_name", lambda: "NVIDIA H100")
    plan = plan_of(folder, load_config(None, ["generate.device=cuda"]))
    check(report_profile(plan), Verdict.OK, "NVIDIA H100: 702,190 GFLOP/s")


def test_an_object_store_that_does_not_fit_fails() -> None:
    check(check_shm(load_config(None, ["ray.object_store_mib=1024"]), MACHINE), Verdict.OK)
    check(check_shm(load_config(None, ["ray.object_store_mib=1025"]), MACHINE), Verdict.FAILED)


def test_kernels_that_are_not_built_are_a_warning_only() -> None:
    check(check_instruction_set(replace(MACHINE, instruction_set=None)), Verdict.WARNING)
    check(check_instruction_set(MACHINE), Verdict.OK, "x86-64-v3")


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (["orchestrator.port={taken}", "http.port=-1"], "orchestrator.port"),
        (["orchestrator.port=0", "http.port={taken}"], "set http.host and http.port"),
        (["orchestrator.port=0", "orchestrator.metrics_port={taken}"], "orchestrator.metrics_port"),
    ],
)
def test_a_port_in_use_fails(settings: list[str], named: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        finding = check_port(load_config(None, [setting.format(taken=taken) for setting in settings]))
    check(finding, Verdict.FAILED, f"127.0.0.1:{taken} cannot be listened on")
    assert named in finding.text


def test_any_free_port_and_none_are_never_in_use() -> None:
    check(check_port(load_config(None, ["orchestrator.port=0", "http.port=0"])), Verdict.OK)
    for metrics_port in (0, -1):
        settings = ["orchestrator.port=0", f"orchestrator.metrics_port={metrics_port}", "http.port=-1"]
        assert check_port(load_config(None, settings)) == Finding("port", Verdict.OK, "127.0.0.1:0 is free")


@pytest.mark.skipif(not has_ipv6(), reason="needs IPv6")
@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_a_port_of_an_ipv6_address_is_free_or_in_use(host: str) -> None:
    settings = [f"orchestrator.host={host}", "orchestrator.metrics_port=0", "http.port=-1"]
    check(check_port(load_config(None, [*settings, "orchestrator.port=0"])), Verdict.OK, "[::1]:0 is free")
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as server:
        taken = server.getsockname()[1]
        finding = check_port(load_config(None, [*settings, f"orchestrator.port={taken}"]))
    check(finding, Verdict.FAILED, f"[::1]:{taken} cannot be listened on")


def test_a_host_of_another_machine_fails() -> None:
    check(check_port(load_config(None, ["orchestrator.host=192.0.2.77"])), Verdict.FAILED)


def test_failed_findings_are_raised_by_name(folder: Path) -> None:
    config = load_config(None, ["orchestrator.port=0", "http.port=0"])
    require(examine(plan_of(folder, config), MACHINE))
    with pytest.raises(ConfigError, match="/dev/shm: 0 MiB free"):
        require(examine(plan_of(folder, config), replace(MACHINE, shm_bytes=0)))


def test_a_cluster_elsewhere_is_not_judged_by_this_machine(folder: Path) -> None:
    config = load_config(None, ["orchestrator.port=0", "ray.address=10.0.0.1:6379"])
    found = examine(plan_of(folder, config), replace(MACHINE, shm_bytes=0, available_bytes=0))
    require(found)
    assert {"devices", "cores", "memory", "/dev/shm"}.isdisjoint(finding.name for finding in found)


def test_this_machine_can_be_inspected() -> None:
    machine = inspect_machine()
    assert machine.cpus
    assert machine.available_bytes > 0


@pytest.mark.parametrize(("dtype", "weights"), [("float32", "stored"), ("bfloat16", "int8")])
def test_rates_are_those_of_the_configured_model_and_threads(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, dtype: str, weights: str
) -> None:
    for name in ("_READ_BYTES", "_OUT_OF_CACHE_BYTES", "_KV_BYTES"):
        monkeypatch.setattr(f"deploy.machine.probe.{name}", 2**18)
    asked = []

    def recorded(shape: ModelShape, *args: Any, **options: Any) -> MeasuredRates:
        asked.append((shape, *args, options))
        return measure(shape, *args, **options)

    monkeypatch.setattr("deploy.machine.probe.measure", recorded)
    values = ["generate.num_threads=1", f"model.dtype={dtype}", f"model.weights={weights}"]
    folder = write_letter_model(tmp_path)
    finding = measure_rates(plan_of(folder, load_config(None, values)), MACHINE)
    shape = ResolvedModel(folder).shape(dtype)
    assert asked == [(shape, dtype, 1, MACHINE.available_bytes, {"weights": weights})]
    doubt = "this machine is busy" in finding.text or "at least" in finding.text
    assert finding.verdict is (Verdict.WARNING if doubt else Verdict.OK)
    assert re.match(r"reads \S+ GB/s, computes \S+ TFLOP/s, attends to \S+ GB/s.* \(1 thread\)", finding.text)


def test_rates_that_cannot_be_measured_leave_the_other_findings(folder: Path, tmp_path: Path) -> None:
    short = replace(MACHINE, available_bytes=2**20)
    (tmp_path / "letters").mkdir()
    check(measure_rates(plan_of(folder), MACHINE), Verdict.WARNING, "not measured: ")
    letters = write_letter_model(tmp_path / "letters")
    check(measure_rates(plan_of(letters), short), Verdict.WARNING, "GB of memory, 0.0 are free: free some")


def test_kernels_in_use_stand_beside_the_rates_of_all_ways() -> None:
    finding = measure_kernels()
    assert finding.verdict is Verdict.OK
    assert finding.text.startswith(f"{KERNELS.choice}; GFLOP/s of a core in layers of 1, 8, 32, 128, 512 rows: ")
    ways = re.findall(r"(\w+) ((?:[\d.e+]+, ){4}[\d.e+]+)", finding.text.partition("rows: ")[2])
    assert {"torch", KERNELS.choice.panels} <= {way for way, _ in ways}
    assert all(float(rate) > 0 for _, rates in ways for rate in rates.split(", "))
    assert float(finding.text.rpartition("bare product ")[2]) > 0
