"""The command `baton` in this process, as a user types it."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from deploy.cli import main


@dataclass(frozen=True)
class Run:
    """Exit status and output of a command."""

    status: int
    out: str
    err: str


class Baton:
    """Runs commands: their words after `baton`, or one text that is split at blanks."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def run(self, command: str | Sequence[str]) -> Run:
        return self._ended(main(_words(command)))

    async def run_beside(self, command: str | Sequence[str]) -> Run:
        """Run a command in a thread, while the loop goes on."""
        return self._ended(await asyncio.to_thread(main, _words(command)))

    def shown(self, command: str | Sequence[str]) -> str:
        """Return the output of a command that succeeds and complains about nothing."""
        run = self.run(command)
        assert (run.status, run.err) == (0, "")
        return run.out

    def json(self, command: str | Sequence[str]) -> dict[str, Any]:
        """Return what the command shows with --json."""
        found: dict[str, Any] = json.loads(self.shown([*_words(command), "--json"]))
        return found

    def refusal(self, command: str | Sequence[str], status: int = 2, *, may_show: bool = False) -> str:
        """Return the one line in which a command is refused. It shows nothing else, unless it may."""
        run = self.run(command)
        assert run.status == status and (may_show or not run.out), run
        assert run.err.startswith("baton: ") and run.err.count("\n") == 1, run.err
        return run.err

    def _ended(self, status: int) -> Run:
        return Run(status, *self._capsys.readouterr())


def _words(command: str | Sequence[str]) -> list[str]:
    return command.split() if isinstance(command, str) else list(command)
