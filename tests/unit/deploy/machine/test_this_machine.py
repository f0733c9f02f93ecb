"""Properties of this machine, as programs of its drivers report them."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from deploy.config.environment import restrict_gpus, visible_gpus
from deploy.machine.this_machine import GpuState, find_gpus, gpu_name, gpu_report, inspect_machine, parse_gpus

pytestmark = pytest.mark.integration

REPORT = """\
0, NVIDIA H200, 143771, 4, GPU-1f3c9a52-7a1e-4b0c-8a63-51d9be0e7f01
1, NVIDIA H200, 143771, 90112, GPU-1f3c9a52-0000-4b0c-8a63-51d9be0e7f02
2, NVIDIA L4, 23034, 1, GPU-77aa9a52-7a1e-4b0c-8a63-51d9be0e7f03
"""
MIB = 2**20


@pytest.fixture
def fresh() -> Iterator[None]:
    """The driver is asked again, in this test and after it."""
    gpu_report.cache_clear()
    yield
    gpu_report.cache_clear()


@pytest.mark.parametrize(
    ("script", "name"),
    [(f"cat <<END\n{REPORT}END", "NVIDIA H200"), ("echo no driver >&2; exit 9", ""), ("", "")],
)
def test_the_driver_names_the_gpus(
    script: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh: None
) -> None:
    """A driver that fails, or none at all, leaves the machine without GPUs."""
    if script:
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin" if script.startswith("cat") else str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpu_name() == name
    assert find_gpus() == inspect_machine().gpus == (parse_gpus(REPORT) if name else ())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert not find_gpus() and gpu_name() == name, "a process without a GPU knows the kind of its cluster's"


def test_a_line_of_the_driver_is_a_gpu() -> None:
    idle, in_use, other = parse_gpus(REPORT)
    assert idle == GpuState(0, "NVIDIA H200", 143771 * MIB, 143767 * MIB, "GPU-1f3c9a52-7a1e-4b0c-8a63-51d9be0e7f01")
    assert in_use.free_bytes == (143771 - 90112) * MIB and other.name == "NVIDIA L4"
    assert list(map(str, (idle, in_use))) == [
        "GPU 0: NVIDIA H200, 140.4 GiB",
        "GPU 1: NVIDIA H200, 140.4 GiB, 88.0 GiB in use by others",
    ]


@pytest.mark.parametrize(("used", "is_in_use"), [(50, False), (51, True)])
def test_a_twentieth_of_the_memory_is_the_driver_s_own(used: int, is_in_use: bool) -> None:
    (gpu,) = parse_gpus(f"0, NVIDIA L4, 1000, {used}, GPU-a")
    assert ("in use by others" in str(gpu)) == is_in_use


@pytest.mark.parametrize(
    "sizes", ["[N/A], [N/A]", "40960, [N/A]", "[Not Supported], 5", "40960, [Insufficient Permissions]"]
)
def test_sizes_that_the_driver_does_not_report_are_unknown(sizes: str) -> None:
    (gpu,) = parse_gpus(f"0, NVIDIA A100-SXM4-40GB, {sizes}, GPU-a")
    assert (gpu.total_bytes, gpu.free_bytes) == (0, 0)
    assert str(gpu) == "GPU 0: NVIDIA A100-SXM4-40GB, memory unknown"


@pytest.mark.parametrize("report", ["", "No devices were found\n", "Failed to initialize NVML"])
def test_other_output_lists_no_gpus(report: str) -> None:
    assert parse_gpus(report) == ()
    assert parse_gpus(report, "0,MIG-5c89") == ()


@pytest.mark.parametrize(
    ("visible", "indices"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("2,0", [2, 0]),
        (" 1 ", [1]),
        ("1,7,0", [1]),
        ("GPU-77aa", [2]),
        ("GPU-1f3c9a52-0000-4b0c-8a63-51d9be0e7f02,2", [1, 2]),
        ("GPU-1f3c", []),
    ],
)
def test_visible_gpus_are_those_that_cuda_would_see(visible: str | None, indices: list[int]) -> None:
    """An entry that names no GPU, or more than one, ends the list."""
    assert [gpu.index for gpu in parse_gpus(REPORT, visible)] == indices


def test_mig_instances_are_gpus_of_unknown_memory() -> None:
    found = parse_gpus(REPORT, "MIG-5c89b1,MIG-77aa00")
    assert [(gpu.name, gpu.total_bytes, gpu.uuid) for gpu in found] == [
        ("NVIDIA H200", 0, "MIG-5c89b1"),
        ("NVIDIA H200", 0, "MIG-77aa00"),
    ]


def test_chosen_gpus_are_all_that_later_processes_see(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    restrict_gpus(["GPU-77aa", "GPU-1f3c9a52-0000"])
    assert [gpu.index for gpu in parse_gpus(REPORT, visible_gpus())] == [2, 1]


def test_a_torch_without_cuda_is_known_without_importing_it() -> None:
    assert inspect_machine().has_cuda == (torch.version.cuda is not None)
