"""`baton gateway`: what it refuses to start with."""

import pytest

from tests.support.wire.commands import Baton


@pytest.mark.parametrize(
    ("arguments", "status", "named"),
    [
        ("--port 70000", 2, "--port 70000 is out of range"),
        ("--grace -1", 2, "--grace -1 is out of range"),
        ("--grace nan", 2, "--grace nan is out of range"),
        ("--orchestrator=", 2, "--orchestrator is empty"),
        ("--orchestrator 127.0.0.1:1", 1, "no orchestrator answers at 127.0.0.1:1"),
    ],
)
def test_what_cannot_be_is_one_line(baton: Baton, arguments: str, status: int, named: str) -> None:
    run = baton.run(f"gateway {arguments}")
    (line,) = [line for line in run.err.splitlines() if line.startswith("baton:")]
    assert run.status == status and named in line
