"""`baton calibrate` says in one line what it lacks; what it does is shown on a real cluster (tests/system)."""

import os

import pytest

from deploy.commands.record import ClusterRecord, process_start
from deploy.config.environment import SECRET_VARIABLE
from tests.support.wire.commands import Baton

pytestmark = pytest.mark.usefixtures("cache", "known")


def test_without_a_cluster(baton: Baton) -> None:
    expected = "baton: cluster none is not running here: start it with `baton serve`, or give --target\n"
    assert baton.refusal("calibrate none") == expected


def test_while_the_cluster_starts(baton: Baton) -> None:
    pid = os.getpid()
    ClusterRecord("young", pid, process_start(pid), "", "").save()
    expected = "baton: cluster young is starting: try again when `baton status young` shows its groups\n"
    assert baton.refusal("calibrate young", status=1) == expected


@pytest.mark.parametrize("repeats", ["0", "1001"])
def test_repeats_out_of_range(baton: Baton, repeats: str) -> None:
    expected = f"baton: --repeats {repeats} is out of range: use 1 to 1000\n"
    assert baton.refusal(f"calibrate --repeats {repeats}") == expected


def test_a_target_where_nobody_listens(baton: Baton) -> None:
    assert "127.0.0.1:1" in baton.refusal("calibrate --target 127.0.0.1:1", status=1)


def test_a_target_without_its_secret(baton: Baton, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SECRET_VARIABLE)
    expected = f"baton: environment variable {SECRET_VARIABLE} is not set: export it\n"
    assert baton.refusal("calibrate --target 127.0.0.1:1") == expected
    monkeypatch.setenv(SECRET_VARIABLE, "guess")
    expected = "baton: the cluster's secret is 5 characters: give the 64 hexadecimal digits that its launcher made\n"
    assert baton.refusal("calibrate --target 127.0.0.1:1") == expected


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("--generate --lengths 8", "--lengths: only without --generate"),
        ("--generate --checks 8", "--checks: only without --generate"),
        ("--batches 8", "--batches: only with --generate"),
        ("--contexts 8", "--contexts: only with --generate"),
    ],
)
def test_options_of_the_other_measurement(baton: Baton, arguments: str, text: str) -> None:
    assert baton.refusal(f"calibrate {arguments}") == f"baton: {text}\n"
