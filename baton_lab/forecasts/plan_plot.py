"""Plots of `baton plan`. They show predictions for steps or for speculation, over context length and over batch
size."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from baton_lab.forecasts.plan_results import RoundCell, SpeculationForecast, StepCell, StepForecast
from baton_lab.plot import require_plots, write_plot

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Cell = TypeVar("Cell", StepCell, RoundCell)


def draw(plan: StepForecast, path: Path) -> None:
    """Draw the predictions for steps as a PNG file at `path`. Raises the errors of `require_plots` and `write_plot`."""
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


def draw_speculation(plan: SpeculationForecast, path: Path) -> None:
    """Draw the predicted speedup by speculation as a PNG file at `path`. Raises the errors of `require_plots` and
    `write_plot`."""
    require_plots(path)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15.0, 8.0), layout="constrained")
    panels = figure.subplots(2, 3)
    by_batch: list[tuple[Axes, str, Callable[[RoundCell], float]]] = [
        (panels[0, 0], "draft step / plain step", lambda cell: cell.draft_ratio),
        (panels[0, 1], "step that verifies / plain step", lambda cell: cell.verify_ratio),
        (panels[0, 2], "speedup (predicted, at most)", lambda cell: cell.speedup),
        (panels[1, 0], "KV's part of a plain step", lambda cell: cell.kv_share),
        (panels[1, 1], "drafts of a row", lambda cell: cell.num_drafts),
    ]
    for panel, label, value in by_batch:
        _curves(panel, plan.cells, "batch", "context", value)
        panel.set(ylabel=label, xlabel="batch; dotted: does not fit")
    _curves(panels[1, 2], plan.cells, "context", "batch", lambda cell: cell.speedup)
    panels[1, 2].set(ylabel="speedup (predicted, at most)", xlabel="tokens of context; dotted: does not fit")
    for panel in panels.flat:
        along = "context" if panel is panels[1, 2] else "batch"
        ticks = sorted({getattr(cell, along) for cell in plan.cells})
        panel.set_xscale("log")
        panel.set_xticks(ticks, [str(tick) for tick in ticks])
        panel.minorticks_off()
        panel.legend(fontsize="x-small")
    for panel in (panels[0, 2], panels[1, 2]):
        panel.axhline(1.0, color="0.6", linestyle=":")
    write_plot(figure, plan.title, path)


def _curves(panel: "Axes", cells: Sequence[Cell], along: str, each: str, value: Callable[[Cell], float]) -> None:
    """Draw `value` over the field `along`, one curve per value of the field `each`; dotted where the model does not fit
    in memory."""
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
