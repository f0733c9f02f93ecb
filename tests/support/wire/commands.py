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
    """Runs `baton` commands. A command is a list of the words after `baton`, or one string that is split at blanks."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def run(self, command: str | Sequence[str]) -> Run:
        return self._ended(main(_words(command)))

    async def run_beside(self, command: str | Sequence[str]) -> Run:
        """Run a command in a thread while the event loop continues."""
        return self._ended(await asyncio.to_thread(main, _words(command)))

    def shown(self, command: str | Sequence[str]) -> str:
        """Run a command. Return its output. Fails if the command fails or writes to standard error."""
        run = self.run(command)
        assert (run.status, run.err) == (0, "")
        return run.out

    def json(self, command: str | Sequence[str]) -> dict[str, Any]:
        """Run a command with --json, and return its decoded output."""
        found: dict[str, Any] = json.loads(self.shown([*_words(command), "--json"]))
        return found

    def refusal(self, command: str | Sequence[str], status: int = 2, *, may_show: bool = False) -> str:
        """Run a command that must be refused with exit status `status`. Return its one line on standard error. Its
        standard output must be empty, unless `may_show` is true."""
        run = self.run(command)
        assert run.status == status and (may_show or not run.out), run
        assert run.err.startswith("baton: ") and run.err.count("\n") == 1, run.err
        return run.err

    def _ended(self, status: int) -> Run:
        return Run(status, *self._capsys.readouterr())


def _words(command: str | Sequence[str]) -> list[str]:
    return command.split() if isinstance(command, str) else list(command)
