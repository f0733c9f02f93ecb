"""Plot of `baton simulate-traffic`, with three curves over time: tokens that arrive, time to first token, and
percentage of good requests (those within the latency targets)."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from baton_lab.plot import require_plots, write_plot
from baton_lab.traffic.results import Results, Targets
from baton_lab.traffic.traces.trace import Trace

_BINS = 120


def draw(trace: Trace, runs: Mapping[str, Results], targets: Targets, path: Path) -> None:
    """Draw the results as a PNG file at `path`. `runs`: results by policy. Raises the errors of `require_plots` and
    `write_plot`."""
    require_plots(path)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 8.0), layout="constrained")
    arriving, first, good = figure.subplots(3, 1, sharex=True)
    edges = np.linspace(0.0, max(trace.duration_s, 1e-9), min(_BINS, max(len(trace) // 10, 2)) + 1)
    middles, width_s = (edges[1:] + edges[:-1]) / 2, edges[1] - edges[0]
    counts, _ = np.histogram(trace.arrivals_s, edges)
    for name, tokens in (("prompt", trace.prompt_tokens), ("output", trace.output_tokens)):
        sums, _ = np.histogram(trace.arrivals_s, edges, weights=tokens)
        arriving.plot(middles, sums / width_s, label=f"{name} tokens/s")
    arriving.set(ylabel="arriving", yscale="log")
    place = np.clip(np.digitize(trace.arrivals_s, edges) - 1, 0, len(middles) - 1)
    for name, results in runs.items():
        late = [
            np.nanpercentile(results.ttft_s[place == each], 95) if counts[each] else np.nan
            for each in range(len(middles))
        ]
        shares = np.histogram(trace.arrivals_s, edges, weights=results.is_good(targets).astype(float))[0] / np.maximum(
            counts, 1
        )
        first.plot(middles, late, label=name)
        good.plot(middles, 100 * shares, label=name)
    first.axhline(targets.ttft_s, color="0.5", linestyle=":")
    first.set(ylabel="TTFT p95, s", yscale="log")
    good.set(ylabel="good requests, %", xlabel="seconds", ylim=(0, 105))
    for panel in (arriving, good):
        panel.legend(fontsize="small")
    write_plot(figure, f"{trace.name}, {len(trace)} requests (predicted)", path)
