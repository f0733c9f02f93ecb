"""`baton calibrate` measures this machine again, and replaces the profile that is kept."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from baton.planning.device_profile import nominal_core, save
from deploy.commands.record import ClusterRecord, live_clusters, process_start
from deploy.machine import device_profile
from deploy.machine.device_profile import kept_path, kept_profile, must_measure
from deploy.options import screen
from tests.support.wire.commands import Baton, Run

pytestmark = pytest.mark.usefixtures("threads")
COMMAND = ("calibrate", "--device", "cpu", "--dtype", "float32", "--seconds", "0.3")


@pytest.fixture
def threads() -> Iterator[None]:
    """Restore the number of torch's threads, which a measurement changes."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_a_profile_is_measured_and_replaced(cache: Path, baton: Baton, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_profile, "_AGREEMENT", 1.0)  # this machine may be busy
    first = baton.run(COMMAND)
    assert first.status == 0 and first.err == ""
    made = kept_profile("cpu", 4)
    assert made is not None and made.is_measured
    assert first.out == f"float32: {made}\n  before: nothing was kept\n"
    second = baton.run(COMMAND)
    assert second.out == f"float32: {kept_profile('cpu', 4)}\n  before: {made}\n"
    assert kept_profile("cpu", 2) is None


def test_progress_ends_with_the_measurement(cache: Path, baton: Baton, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []

    @contextmanager
    def progress(_console: Console, _what: str, total: int) -> Iterator[Callable[[int], None]]:
        yield steps.append
        assert sum(steps) == total > 0

    monkeypatch.setattr(screen, "progress", progress)
    monkeypatch.setattr(device_profile, "NUM_HALVES", 6)
    monkeypatch.setattr(device_profile, "_AGREEMENT", 1.0)
    assert baton.run(COMMAND).status == 0


def test_rates_that_do_not_agree_leave_the_former(cache: Path, baton: Baton, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_profile, "_AGREEMENT", -1.0)
    former = replace(nominal_core(4), is_measured=True)
    kept_path("cpu", 4).parent.mkdir(parents=True)
    save(former, kept_path("cpu", 4))
    assert baton.run(COMMAND) == Run(1, f"float32: not kept\n  before: {former}\n", "")
    assert kept_profile("cpu", 4) == former and not must_measure("cpu", 4)


def test_a_running_cluster_would_distort_the_rates(cache: Path, baton: Baton, monkeypatch: pytest.MonkeyPatch) -> None:
    pid = os.getpid()
    ClusterRecord("mine", pid, process_start(pid), "here:1", "").save()
    refused = "baton: cluster mine runs on this machine: end it with `baton stop`, or add --anyway\n"
    assert baton.run(COMMAND) == Run(1, "", refused)
    monkeypatch.setattr(device_profile, "_AGREEMENT", 1.0)
    assert baton.run([*COMMAND, "--anyway"]).status == 0
    ClusterRecord("mine", pid, "another start", "here:1", "").save()
    assert live_clusters() == []


def test_seconds_are_checked_before_anything_is_measured(cache: Path, baton: Baton) -> None:
    refused = baton.run("calibrate --seconds 0")
    assert refused.status == 2 and refused.err.startswith("baton: --seconds")
