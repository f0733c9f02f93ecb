"""Plot of `baton evaluate`, with one column per context length, after the InfiniGen paper (Lee et al., OSDI 2024).

The rows show, from top to bottom:

- the loss of quality over the amount of KV read (the paper's figures 11 and 19),
- the fraction of steps with the same most likely token as full attention,
- the perplexity along the text (figure 12), with each policy at a similar amount of KV read,
- if it was measured, the fraction of full attention's weights that belongs to the keys that are read.
"""

import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from baton_lab.plot import require_plots, write_plot
from baton_lab.quality.evaluation import Cell, Evaluation

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_ROW_INCHES = 3.4
_TITLE_CHARACTERS = 70
"""Maximum number of characters in a line of the title, if the plot has one column. It is multiplied by the number of
columns."""
_PERCENTS = (5, 10, 20, 50, 100)
_Curves = dict[str, list[Cell]]
"""Cells (results of one setting at one context length) of each curve. The key is the curve's label, which names the
policy and the selection file. The cells of a curve are in ascending order of the amount of KV that is read."""


def draw(evaluation: Evaluation, path: Path) -> None:
    """Draw the evaluation as a PNG file at `path`. Raises the errors of `require_plots` and `write_plot`."""
    require_plots(path)
    from matplotlib.figure import Figure

    contexts = sorted({cell.context for cell in evaluation.cells})
    has_mass = any(cell.mass is not None for cell in evaluation.cells)
    num_panels = 4 if has_mass else 3
    figure = Figure(figsize=(5.4 * len(contexts), _ROW_INCHES * num_panels), layout="constrained")
    panels = figure.subplots(num_panels, len(contexts), sharey="row", squeeze=False)
    for column, context in enumerate(contexts):
        curves = _curves([cell for cell in evaluation.cells if cell.context == context])
        _over_bytes(panels[0, column], curves, lambda cell: 100 * cell.cost)
        _over_bytes(panels[1, column], curves, lambda cell: cell.same_choice)
        _over_text(panels[2, column], curves, evaluation.num_steps)
        if has_mass:
            _over_bytes(panels[3, column], curves, lambda cell: cell.mass)
        panels[0, column].set_title(f"{context} tokens of context")
        panels[0, column].axhline(0, color="0.6", linewidth=0.8)
    names = ("perplexity above full attention's, %", "fraction of steps with the same choice", "perplexity")
    for panel, name in zip(panels[:, 0], (*names, "true attention on the keys read"), strict=False):
        panel.set_ylabel(name)
    panels[0, -1].legend(fontsize="small")
    write_plot(figure, textwrap.fill(evaluation.title, _TITLE_CHARACTERS * len(contexts)), path)


def _curves(cells: Sequence[Cell]) -> _Curves:
    curves: _Curves = {}
    for cell in sorted(cells, key=lambda cell: cell.kv_share):
        label = cell.policy if cell.selection is None else f"{cell.policy} {cell.selection}"
        label += "" if cell.pool is None else f" pool {cell.pool:g} {cell.eviction}"
        curves.setdefault(label, []).append(cell)
    return dict(sorted(curves.items()))  # sorted, so that a policy has its colour in all panels


def _over_bytes(panel: "Axes", curves: _Curves, value: Callable[[Cell], float | None]) -> None:
    """Draw a curve of `value` over the KV read for each policy; none for a policy without values."""
    for at, (label, cells) in enumerate(curves.items()):
        points = [(100 * cell.kv_share, number) for cell in cells if (number := value(cell)) is not None]
        if points:
            panel.plot(*zip(*points, strict=True), marker="o", color=f"C{at % 10}", label=label)
    panel.set(xscale="log", xlabel="KV read, % of full attention's")
    panel.set_xticks(_PERCENTS, [str(percent) for percent in _PERCENTS])
    panel.minorticks_off()


def _over_text(panel: "Axes", curves: _Curves, num_steps: int) -> None:
    """Draw each policy's perplexity along the text. Each policy is represented by the cell whose KV read is closest to
    that of the first inexact policy."""
    approximate = [cells[0].kv_share for cells in curves.values() if not cells[0].is_exact]
    target = approximate[0] if approximate else 1.0
    for at, (label, cells) in enumerate(curves.items()):
        cell = min(cells, key=lambda cell: abs(cell.kv_share - target))
        ends = [num_steps * (chunk + 1) / len(cell.chunks) for chunk in range(len(cell.chunks))]
        panel.plot(ends, cell.chunks, marker=".", color=f"C{at % 10}", label=f"{label}, {100 * cell.kv_share:.0f} %")
    panel.set(xlabel="tokens after the context")
    panel.legend(fontsize="x-small", title="KV read", title_fontsize="x-small")
