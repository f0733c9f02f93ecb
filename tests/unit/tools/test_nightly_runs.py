"""Runs of single files at night, in processes of their own: their results, and the end of one that takes too long."""

import sys

import pytest

from tools import nightly

pytestmark = pytest.mark.integration


@pytest.mark.parametrize(
    ("program", "limit_s", "result"),
    [
        ("pass", 60.0, "passed"),
        ("raise SystemExit(1)", 60.0, "failed"),
        ("raise SystemExit(5)", 60.0, None),
        ("import threading; threading.Event().wait(600)", 0.1, "late"),
    ],
    ids=["passes", "fails", "has no such tests", "takes too long"],
)
def test_a_file_s_result(program: str, limit_s: float, result: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nightly, "_command", lambda *arguments: [sys.executable, "-c", program])
    assert nightly._run_file("tests/test_any.py", limit_s) == result
