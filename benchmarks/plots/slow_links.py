"""Plot of `benchmarks.slow_links`: measured and predicted times to first token, over bandwidth."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_STYLES = {
    "kvr_s": ("KVR-S", "tab:blue"),
    "even": ("even chunks", "tab:cyan"),
    "zigzag": ("zigzag ring", "tab:purple"),
    "single": ("one rank", "0.5"),
}
"""Label and colour of each scheme in the plot."""


@dataclass(frozen=True)
class Curve:
    """Measured and predicted times to first token for one prompt length."""

    num_tokens: int
    links_mb_s: Sequence[float]
    measured: Mapping[str, Sequence[Sequence[float]]]
    """Measured seconds by scheme. Each scheme has one list per link, with the seconds of every round."""
    grid_mb_s: Sequence[float]
    """Bandwidths in MB/s for which times are predicted."""
    predicted: Mapping[str, Sequence[float]]
    """Predicted seconds by scheme, one for each bandwidth in `grid_mb_s`."""


def draw(curves: Sequence[Curve], path: Path) -> None:
    """Draw the curves, and write a PNG to `path`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.6 * len(curves), 4.4), layout="constrained")
    panels = figure.subplots(1, len(curves), sharex=True, squeeze=False)[0]
    for panel, curve in zip(panels, curves, strict=True):
        for scheme, (label, colour) in _STYLES.items():
            medians = [statistics.median(rounds) for rounds in curve.measured[scheme]]
            panel.plot(curve.grid_mb_s, curve.predicted[scheme], "-", color=colour, linewidth=1.2, label=label)
            panel.plot(curve.links_mb_s, medians, "o", color=colour, markersize=5)
        panel.set(title=f"{curve.num_tokens} tokens", xscale="log", xlabel="link, MB/s")
        panel.set_ylim(bottom=0.0)
        panel.set_xticks(curve.links_mb_s, [f"{mb_s:g}" for mb_s in curve.links_mb_s])
        panel.xaxis.minorticks_off()
        panel.grid(visible=True, alpha=0.3)
    panels[0].set_ylabel("time to first token, s (lines: model; points: measured)")
    panels[-1].legend(fontsize="small")
    figure.savefig(path, format="png", dpi=120)
