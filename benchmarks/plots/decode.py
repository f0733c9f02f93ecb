"""Plot of the results of `benchmarks.decode`, over context length and over batch size: measured time per token,
predicted time, and lower bound."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from baton.planning.chips import Chip
from baton_lab.study.roofline import ServedModel, step_time

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class Step:
    """Measured duration of a decode step for one batch size and context length."""

    batch: int
    context: int
    step_ms: float
    """Median duration of a step of Baton over all rounds, in milliseconds."""


def draw(measured: Sequence[Step], model: ServedModel, chip: Chip, path: Path) -> None:
    """Draw the measured and predicted step times, and write a PNG to `path`. The time of a step is also a stream's time
    per token, because a step yields one token per sequence."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.0, 4.8), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    _panel(left, measured, model, chip, by_batch=True)
    _panel(right, measured, model, chip, by_batch=False)
    left.set(xlabel="tokens of context", ylabel="time per token, ms")
    right.set(xlabel="batch")
    figure.suptitle(
        "points: measured; lines: roofline of this machine; dotted: the floor, all bytes once", fontsize="medium"
    )
    figure.savefig(path, format="png", dpi=120)


def _panel(panel: "Axes", measured: Sequence[Step], model: ServedModel, chip: Chip, *, by_batch: bool) -> None:
    """Draw one curve per batch size over contexts, or one per context over batch sizes."""
    sizes = [(step.batch, step.context) for step in measured]
    each, along = (0, 1) if by_batch else (1, 0)
    xs = np.unique(np.geomspace(min(size[along] for size in sizes), max(size[along] for size in sizes), 60).astype(int))
    for at, number in enumerate(sorted({size[each] for size in sizes})):
        colour = f"C{at % 10}"
        curve = [(number, int(x)) if by_batch else (int(x), number) for x in xs]
        steps = [step_time(model, chip, batch=batch, context=context).total_s * 1e3 for batch, context in curve]
        floors = [floor_s(model, chip.memory_bandwidth, batch, context) * 1e3 for batch, context in curve]
        panel.plot(xs, steps, "-", color=colour, linewidth=1.2)
        panel.plot(xs, floors, ":", color=colour, linewidth=1.2)
        shown = [step for step, size in zip(measured, sizes, strict=True) if size[each] == number]
        panel.plot(
            [(step.context if by_batch else step.batch) for step in shown],
            [step.step_ms for step in shown],
            "o",
            color=colour,
            label=f"{'batch' if by_batch else 'context'} {number}",
        )
    panel.set(xscale="log", yscale="log")
    ticks = sorted({size[along] for size in sizes})
    panel.set_xticks(ticks, [str(tick) for tick in ticks])
    panel.minorticks_off()
    panel.grid(visible=True, alpha=0.3)
    panel.legend(fontsize="small")


def floor_s(model: ServedModel, bandwidth: float, batch: int, context: int) -> float:
    """Return the minimum duration of a decode step in seconds: the time to read weights and KV once from memory at
    `bandwidth` bytes per second."""
    return (model.all_weight_bytes + batch * model.kv_read_bytes(context)) / bandwidth
