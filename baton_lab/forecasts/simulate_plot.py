"""Plot of `baton simulate`: time to first token over context length, with one column per number of ranks. The upper row
shows seconds. The lower row shows the time divided by that of KVR-S, in which the ranks prefill consecutive chunks of
the prompt, and a search finds the best chunk lengths."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from baton_lab.plot import require_plots, write_plot
from baton_lab.study.comparison import Comparison

_CURVES = (
    ("single", "1 rank", "0.6", "-"),
    ("tsp_dense", "TSP dense", "tab:red", "-"),
    ("tsp_causal", "TSP causal", "tab:orange", "-"),
    ("zigzag_ring", "zigzag ring", "tab:purple", "-"),
    ("kvr_e", "KVR-E", "tab:cyan", "-"),
    ("kvr_s", "KVR-S", "tab:blue", "-"),
    ("kvr_p", "KVR-P", "black", ":"),
    ("bound", "bound", "0.3", "--"),
    ("paper_bound", "TTFT*", "tab:green", "--"),
)
"""Curves of the plot, each as (field of Comparison, label, colour, line style)."""


def draw(title: str, by_ranks: Mapping[int, Sequence[Comparison]], path: Path) -> None:
    """Draw the comparisons as a PNG file at `path`. `by_ranks`: comparisons by number of ranks. Raises the errors of
    `require_plots` and `write_plot`."""
    require_plots(path)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.6 * len(by_ranks), 7.0), layout="constrained")
    panels = figure.subplots(2, len(by_ranks), sharex=True, sharey="row", squeeze=False)
    for column, (num_ranks, rows) in enumerate(by_ranks.items()):
        tokens = [row.num_tokens for row in rows]
        for field, label, colour, style in _CURVES:
            seconds = [getattr(row, field) for row in rows]
            ratios = [value / row.kvr_s for value, row in zip(seconds, rows, strict=True)]
            for panel, values in ((panels[0, column], seconds), (panels[1, column], ratios)):
                panel.plot(tokens, values, style, color=colour, label=label, marker=".", linewidth=1.4)
        panels[0, column].set(title=f"{num_ranks} ranks", yscale="log")
        panels[1, column].set(xlabel="prompt tokens", xscale="log", ylim=(0, 3))
        panels[1, column].set_xticks(tokens, [_short(n) for n in tokens])
        panels[1, column].minorticks_off()
    panels[0, 0].set_ylabel("time to first token, s (predicted)")
    panels[1, 0].set_ylabel("times that of KVR-S")
    panels[0, -1].legend(fontsize="small")
    write_plot(figure, title, path)


def _short(num_tokens: int) -> str:
    return f"{num_tokens // 1024}k" if num_tokens % 1024 == 0 else str(num_tokens)
