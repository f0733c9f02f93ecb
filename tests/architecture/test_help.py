"""The help of every command describes its options, and shows only defaults that exist."""

import re
import sys
from importlib import import_module
from pathlib import Path

import pytest

from deploy.cli import build_parser

ROOT = Path(__file__).parents[2]
PROGRAMS = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for folder in ("baton", "baton_lab", "benchmarks", "deploy", "tools")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if path.parent.name != "peers" and re.search(r"(?s)(ArgumentParser|make_parser)\(.*__main__", path.read_text())
]
"""Modules that are run with `python -m` and have options."""
[COMMANDS] = [action.choices for action in build_parser()._actions if isinstance(action.choices, dict)]


def shows_a_missing_default(text: str) -> bool:
    return re.search(r"default: (None|False|\[\])", " ".join(text.split())) is not None


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command(command: str) -> None:
    assert not shows_a_missing_default(COMMANDS[command].format_help())


@pytest.mark.parametrize("program", PROGRAMS)
def test_help_of_a_program(program: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", [program, "--help"])
    with pytest.raises(SystemExit) as ended:
        import_module(program).main()
    assert ended.value.code == 0
    assert not shows_a_missing_default(capsys.readouterr().out)


def test_there_are_benchmarks_among_the_programs() -> None:
    assert {"benchmarks.served", "benchmarks.checkouts", "deploy.machine.device_profile"} <= set(PROGRAMS)
