"""`baton calibrate` says in one line what it lacks; what it does is shown on a real cluster (tests/system)."""

import os
from pathlib import Path

import pytest

from deploy.cli import main
from deploy.commands.record import ClusterRecord, process_start
from deploy.config.environment import SECRET_VARIABLE
from tests.support.wire.secret import SECRET


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(SECRET_VARIABLE, SECRET.text)


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Exit status and the one line of a command that is refused."""
    status = main(["calibrate", *arguments])
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    return status, err.strip()


def test_without_a_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    expected = "baton: cluster none is not running here: start it with `baton serve`, or give --target"
    assert refusal(capsys, "none") == (2, expected)


def test_while_the_cluster_starts(capsys: pytest.CaptureFixture[str]) -> None:
    pid = os.getpid()
    ClusterRecord("young", pid, process_start(pid), "", "").save()
    expected = "baton: cluster young is starting: try again when `baton status young` shows its groups"
    assert refusal(capsys, "young") == (1, expected)


@pytest.mark.parametrize("repeats", ["0", "1001"])
def test_repeats_out_of_range(capsys: pytest.CaptureFixture[str], repeats: str) -> None:
    expected = f"baton: --repeats {repeats} is out of range: use 1 to 1000"
    assert refusal(capsys, "--repeats", repeats) == (2, expected)


def test_a_target_where_nobody_listens(capsys: pytest.CaptureFixture[str]) -> None:
    status, line = refusal(capsys, "--target", "127.0.0.1:1")
    assert status == 1 and "127.0.0.1:1" in line


def test_a_target_without_its_secret(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SECRET_VARIABLE)
    expected = f"baton: environment variable {SECRET_VARIABLE} is not set: export it"
    assert refusal(capsys, "--target", "127.0.0.1:1") == (2, expected)
    monkeypatch.setenv(SECRET_VARIABLE, "guess")
    expected = "baton: the cluster's secret is 5 characters: give the 64 hexadecimal digits that its launcher made"
    assert refusal(capsys, "--target", "127.0.0.1:1") == (2, expected)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--generate", "--lengths", "8"), "--lengths: only without --generate"),
        (("--generate", "--checks", "8"), "--checks: only without --generate"),
        (("--batches", "8"), "--batches: only with --generate"),
        (("--contexts", "8"), "--contexts: only with --generate"),
    ],
)
def test_options_of_the_other_measurement(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], text: str
) -> None:
    assert refusal(capsys, *arguments) == (2, f"baton: {text}")
