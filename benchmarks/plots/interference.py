"""Plot of the results of `benchmarks.interference`, with one panel per side of the comparison. It shows how often a
stream waits longer than a given time for its next token, while the streams run alone and while long prompts arrive."""

from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path

Rounds = Sequence[tuple[Sequence[float], Sequence[float]]]
"""Milliseconds between consecutive tokens of a stream, for each round: (while the streams run alone, while long prompts
arrive)."""
_TICKS_MS = (5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000)


def draw(sides: Mapping[str, Rounds], path: Path) -> None:
    """Draw the distributions of all sides, and write a PNG to `path`."""
    from matplotlib.figure import Figure

    all_ms = [ms for rounds in sides.values() for each in rounds for part in each for ms in part]
    ticks = [ms for ms in _TICKS_MS if min(all_ms) / 1.5 <= ms <= max(all_ms) * 1.5]
    figure = Figure(figsize=(3.4 * len(sides), 3.8), layout="constrained")
    panels = figure.subplots(1, len(sides), sharex=True, sharey=True, squeeze=False)[0]
    for panel, (name, rounds) in zip(panels, sides.items(), strict=True):
        for label, colour, index in (("alone", "0.5", 0), ("long prompts come", "tab:blue", 1)):
            gaps = sorted(chain.from_iterable(each[index] for each in rounds))
            above = [1 - rank / len(gaps) for rank in range(len(gaps))]
            panel.step(gaps, above, where="post", color=colour, linewidth=1.4, label=label)
        panel.axhline(0.01, color="0.7", linewidth=0.8, linestyle="--")
        panel.set(title=name, xscale="log", yscale="log", xlabel="ms to the next token")
        panel.set_xticks(ticks, [f"{ms:g}" for ms in ticks])
        panel.xaxis.minorticks_off()
        panel.grid(visible=True, alpha=0.3)
    panels[0].set_ylabel("part of tokens that take longer (dashed: 1 in 100)")
    panels[-1].legend(fontsize="small")
    figure.savefig(path, format="png", dpi=120)
