"""Plots of `baton bench`: the latency distributions of one load, or a summary plot of several loads."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from baton_lab.bench.loops import Arrivals, Run, Users
from baton_lab.bench.report import NAMES
from baton_lab.bench.statistics import LATENCIES, Summary, latencies
from baton_lab.plot import write_plot

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Runs = Sequence[tuple[Run, Summary]]


def draw(runs: Runs, targets: Mapping[str, float], title: str, path: Path) -> None:
    """Draw the results of the runs as a PNG file at `path`. Requires matplotlib. Raises ConfigError if the file cannot
    be written."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 7.0), layout="constrained")
    panels = figure.subplots(2, 2).flatten()
    if len(runs) == 1:
        _distributions(panels, runs[0][0], targets)
    else:
        _sweep(panels, runs, targets)
    write_plot(figure, title, path)


def _distributions(panels: "Sequence[Axes]", run: Run, targets: Mapping[str, float]) -> None:
    """Draw a cumulative distribution for each latency metric: percent of requests (for itl, of gaps) over
    milliseconds."""
    values = latencies([each for each in run.records if each.is_answered])
    for panel, metric in zip(panels, LATENCIES, strict=True):
        taken = np.sort(values[metric]) * 1e3
        if len(taken):
            panel.step(taken, np.arange(1, len(taken) + 1) / len(taken) * 100, where="post")
        if metric in targets:
            panel.axvline(targets[metric] * 1e3, color="0.5", linestyle=":", label="target")
            panel.legend(fontsize="small")
        panel.set(xlabel=f"{NAMES[metric]}, ms", ylabel="%", ylim=(0, 102), xscale="log")


def _sweep(panels: "Sequence[Axes]", runs: Runs, targets: Mapping[str, float]) -> None:
    """Draw throughput, goodput and latencies over the offered load."""
    at, label = _places(runs)
    summaries = [summary for _, summary in runs]
    rates, good, first, token = panels
    rates.plot(at, [each.requests_s for each in summaries], label="answered", marker=".")
    if targets:
        rates.plot(at, [each.goodput or 0.0 for each in summaries], label="good", marker=".")
    if all(each.offered_rate is not None for each in summaries):
        rates.plot(at, at, color="0.5", linestyle=":", label="offered")
    rates.set(ylabel="requests/s")
    rates.legend(fontsize="small")
    if targets:
        good.plot(at, [100 * (each.good_share or 0.0) for each in summaries], marker=".")
        good.set(ylabel="good requests, %", ylim=(0, 102))
    else:
        good.plot(at, [each.output_tokens_s for each in summaries], marker=".")
        good.set(ylabel="output tokens/s")
    for panel, metric in ((first, "ttft"), (token, "tpot")):
        for percentile in ("p50", "p90", "p99"):
            taken = [1e3 * getattr(each.latencies[metric], percentile) for each in summaries]
            panel.plot(at, taken, label=percentile, marker=".")
        if metric in targets:
            panel.axhline(targets[metric] * 1e3, color="0.5", linestyle=":", label="target")
        panel.set(ylabel=f"{NAMES[metric]}, ms", yscale="log")
        panel.legend(fontsize="small")
    for panel in panels:
        panel.set(xlabel=label)


def _places(runs: Runs) -> tuple[list[float], str]:
    """Return the x-axis position of each load, and the label of the axis."""
    loads = [run.load for run, _ in runs]
    if all(isinstance(each, Users) for each in loads):
        return [float(each.num_users) for each in loads if isinstance(each, Users)], "concurrent users"
    return [each.rate for each in loads if isinstance(each, Arrivals)], "offered rate, requests/s"
