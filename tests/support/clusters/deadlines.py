"""Deadlines that pass when a test says so."""

import asyncio
import contextlib
from types import ModuleType, SimpleNamespace

import pytest


class Deadlines:
    """The timeouts that one module of the product sets by `asyncio.timeout`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> None:
        self._timeouts: list[asyncio.Timeout] = []
        monkeypatch.setattr(module, "asyncio", SimpleNamespace(**{**vars(asyncio), "timeout": self._timeout}))

    def let_pass(self) -> None:
        """Let all timeouts that were set pass now."""
        assert self._timeouts
        for timeout in self._timeouts:
            with contextlib.suppress(RuntimeError):  # it has ended already
                timeout.reschedule(asyncio.get_running_loop().time())

    def _timeout(self, delay_s: float | None) -> asyncio.Timeout:
        self._timeouts.append(asyncio.timeout(delay_s))
        return self._timeouts[-1]
