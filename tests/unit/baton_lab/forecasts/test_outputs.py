"""What all forecasts share: tables that fit a terminal, and plots."""

import sys
from pathlib import Path

import pytest

from tests.support.wire.commands import Baton

SPECULATION = "plan llama-3.1-8b --speculation"
PLOTTED = {
    "plan": "plan llama-13b --hardware tpu-v5e --chips 8 --context 8k,1k",
    "speculation": f"{SPECULATION} --hardware a100 --chips 8 --acceptance 0.82 --draft-keys 512",
    "simulate": "simulate --ranks 2,4 --contexts 64,1k",
}
plotted = pytest.mark.parametrize("command", PLOTTED.values(), ids=PLOTTED)


@pytest.mark.parametrize(
    "command",
    [
        "plan smollm2-135m",
        "plan llama-3.1-8b --hardware h200",
        f"{SPECULATION} --draft-keys 256,512 --acceptance .8,.82",
        "simulate --ranks 2 --contexts 1k,128k",
        "simulate --ranks 2,4,8 --contexts 1k,128k",
    ],
)
def test_tables_fit_80_columns(baton: Baton, command: str) -> None:
    title, *lines = baton.shown(command).splitlines()
    assert max(map(len, lines if command.startswith(SPECULATION) else [title, *lines])) <= 80
    assert not any("\N{HORIZONTAL ELLIPSIS}" in line for line in (title, *lines))


@plotted
def test_plot_is_a_png(baton: Baton, tmp_path: Path, command: str) -> None:
    baton.shown(f"{command} --plot {tmp_path / 'plot.png'}")
    data = (tmp_path / "plot.png").read_bytes()
    assert data.startswith(b"\x89PNG") and len(data) > 10_000


@plotted
def test_without_matplotlib_the_extra_is_named(
    baton: Baton, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    refusal = baton.refusal(f"{command} --plot {tmp_path / 'plot.png'}", may_show=True)
    assert "--plot needs matplotlib: run `pip install 'baton-serve[lab]'`" in refusal
