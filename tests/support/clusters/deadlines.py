"""Timeouts that expire at the test's command."""

import asyncio
import contextlib
from types import ModuleType, SimpleNamespace

import pytest


class Deadlines:
    """Timeouts that one module of the product creates with `asyncio.timeout`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> None:
        self._timeouts: list[asyncio.Timeout] = []
        monkeypatch.setattr(module, "asyncio", SimpleNamespace(**{**vars(asyncio), "timeout": self._timeout}))

    def let_pass(self) -> None:
        """Make all timeouts that were created so far expire now."""
        assert self._timeouts
        for timeout in self._timeouts:
            with contextlib.suppress(RuntimeError):  # the timeout's block has ended already
                timeout.reschedule(asyncio.get_running_loop().time())

    def _timeout(self, delay_s: float | None) -> asyncio.Timeout:
        self._timeouts.append(asyncio.timeout(delay_s))
        return self._timeouts[-1]
