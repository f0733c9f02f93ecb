"""Plot of the results of `benchmarks.served`: metrics of each server for each load of the grid (cell), measured by
clients. It shows the median and the range of the rounds."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.support.answers import Answered

_PANELS = (("tokens_s", "tokens/s"), ("ttft_s", "time to first token, s"), ("p99_ms", "p99 between messages, ms"))
_COLOURS = {"baton": "tab:blue", "vllm": "0.6", "llama.cpp": "tab:orange"}


def draw(cells: Mapping[str, Mapping[str, Sequence[Answered]]], path: Path) -> None:
    """Draw a PNG with one group of bars per cell of the grid, and one bar per measured server."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.0, 8.5), layout="constrained")
    panels = figure.subplots(len(_PANELS), 1, sharex=True)
    names = [side for side in _COLOURS if any(rounds.get(side) for rounds in cells.values())]
    width = 0.8 / len(names)
    for panel, (metric, label) in zip(panels, _PANELS, strict=True):
        for number, side in enumerate(names):
            places = [at + (number - (len(names) - 1) / 2) * width for at in range(len(cells))]
            values = [[float(getattr(each, metric)) for each in rounds[side]] for rounds in cells.values()]
            medians = [statistics.median(each) for each in values]
            low = [median - min(each) for median, each in zip(medians, values, strict=True)]
            high = [max(each) - median for median, each in zip(medians, values, strict=True)]
            panel.bar(places, medians, width, yerr=(low, high), color=_COLOURS[side], label=side, capsize=2)
        panel.set(ylabel=label, yscale="log")
        panel.grid(visible=True, axis="y", alpha=0.3)
    panels[0].legend(fontsize="small")
    panels[-1].set_xticks(range(len(cells)), cells.keys(), rotation=15)
    panels[-1].set_xlabel("streams x prompt tokens : output tokens")
    figure.savefig(path, format="png", dpi=120)
