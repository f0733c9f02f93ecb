"""Processor time that others take, told from one's own."""

import os
from pathlib import Path

import pytest

from benchmarks.support import crowding
from benchmarks.support.crowding import Crowding


def test_what_others_take_is_what_is_busy_beyond_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stat = tmp_path / "stat"
    monkeypatch.setattr(crowding, "_STAT", stat)

    def tell(busy_s: float, idle_s: float) -> None:
        ticks = os.sysconf("SC_CLK_TCK")
        stat.write_text(f"cpu  {busy_s * ticks:.0f} 0 0 {idle_s * ticks:.0f} 0 0 0 0 0 0\ncpu0 1 2 3 4 5 6 7 8 9 10\n")

    tell(1000.0, 1000.0)
    counted = Crowding()
    tell(1000.0, 5000.0)
    assert counted.share() == 0.0
    tell(4000.0, 4000.0)
    assert counted.share() == pytest.approx(0.5, abs=0.01)
