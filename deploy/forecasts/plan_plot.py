"""The plot of `baton plan`: step time and tokens a second, against context for each batch, and the reverse."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.forecasts.plan_results import StepCell, StepForecast
from deploy.options.plot import require_plots, write_plot

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw(plan: StepForecast, path: Path) -> None:
    """Draw the plan as a PNG. Raises what `require_plots` and `write_plot` raise."""
    require_plots(path)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.0, 8.0), layout="constrained")
    panels = figure.subplots(2, 2, sharex="col", sharey="row")
    _curves(panels[0, 0], plan.cells, "context", "batch", lambda cell: cell.step_s * 1e3)
    _curves(panels[0, 1], plan.cells, "batch", "context", lambda cell: cell.step_s * 1e3)
    _curves(panels[1, 0], plan.cells, "context", "batch", lambda cell: cell.tokens_s)
    _curves(panels[1, 1], plan.cells, "batch", "context", lambda cell: cell.tokens_s)
    panels[1, 1].axvline(plan.critical_batch, color="0.6", linestyle=":", label="critical batch")
    sizes = (sorted({cell.context for cell in plan.cells}), sorted({cell.batch for cell in plan.cells}))
    for panel in panels.flat:
        panel.set(xscale="log", yscale="log")
        panel.legend(fontsize="x-small")
    for panel, ticks in zip(panels[1], sizes, strict=True):
        panel.set_xticks(ticks, [str(tick) for tick in ticks])
        panel.minorticks_off()
    panels[0, 0].set_ylabel("step, ms (predicted)")
    panels[1, 0].set_ylabel("tokens/s, all rows (predicted)")
    panels[1, 0].set_xlabel("tokens of context; dotted: does not fit")
    panels[1, 1].set_xlabel("batch")
    write_plot(figure, plan.title, path)


def _curves(
    panel: "Axes", cells: Sequence[StepCell], along: str, each: str, value: Callable[[StepCell], float]
) -> None:
    """Draw a curve for each value of the field `each`, along the field `along`; dotted where it does not fit."""
    for at, number in enumerate(sorted({getattr(cell, each) for cell in cells})):
        curve = [cell for cell in cells if getattr(cell, each) == number]
        fitting = [cell for cell in curve if cell.fits]
        colour = f"C{at % 10}"
        panel.plot([getattr(cell, along) for cell in curve], [value(cell) for cell in curve], ":", color=colour)
        panel.plot(
            [getattr(cell, along) for cell in fitting],
            [value(cell) for cell in fitting],
            "-",
            color=colour,
            marker=".",
            label=f"{each} {number}",
        )
