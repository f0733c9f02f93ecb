"""Plot of the results of `benchmarks.offload`: speedup over the policy `host` for all batch sizes and for all lengths,
and the duration of each part of a step."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.support.policy_table import STREAMED, CellTimes
from benchmarks.support.step_parts import Breakdown

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw(cells: Sequence[CellTimes], breakdowns: Sequence[Breakdown], path: Path) -> None:
    """Draw the plot and write a PNG to `path`. A cell is one measured case (batch size and sequence length). The panel
    over batch sizes shows the cells with the length that most cells have. The panel over lengths shows the cells with
    the batch size that most cells have."""
    from matplotlib.figure import Figure

    num_panels = 3 if breakdowns else 2
    figure = Figure(figsize=(5.2 * num_panels, 4.4), layout="constrained")
    panels = figure.subplots(1, num_panels, squeeze=False)[0]
    for panel, curve, by_batch in zip(panels, (along_batch(cells), along_context(cells)), (True, False), strict=False):
        _speedups(panel, curve, by_batch=by_batch)
    panels[0].set_ylabel(f"times as fast as {STREAMED}")
    if breakdowns:
        _parts(panels[2], breakdowns)
    figure.savefig(path, format="png", dpi=120)


def along_batch(cells: Sequence[CellTimes]) -> list[CellTimes]:
    """Select the sequence length that most cells have, and return its cells ordered by batch size. If several lengths
    are equally frequent, the longest is selected."""
    contexts = Counter(cell.context for cell in cells)
    context = max(contexts, key=lambda each: (contexts[each], each))
    return sorted((cell for cell in cells if cell.context == context), key=lambda cell: cell.batch)


def along_context(cells: Sequence[CellTimes]) -> list[CellTimes]:
    """Select the batch size that most cells have, and return its cells ordered by length. If several batch sizes are
    equally frequent, the largest is selected."""
    batches = Counter(cell.batch for cell in cells)
    batch = max(batches, key=lambda each: (batches[each], each))
    return sorted((cell for cell in cells if cell.batch == batch), key=lambda cell: cell.context)


def _speedups(panel: "Axes", curve: Sequence[CellTimes], *, by_batch: bool) -> None:
    """Draw one line per policy."""
    ticks = [cell.batch if by_batch else cell.context for cell in curve]
    for policy in curve[0].times_ms:
        panel.plot(ticks, [cell.speedup(policy) for cell in curve], "o-", label=policy)
    title, label = (f"{curve[0].context} tokens", "batch") if by_batch else (f"batch {curve[0].batch}", "tokens")
    panel.set(title=title, xlabel=label, xscale="log")
    panel.set_xticks(ticks, [str(tick) for tick in ticks])
    panel.xaxis.minorticks_off()
    panel.set_ylim(bottom=0.0)
    panel.grid(visible=True, alpha=0.3)
    panel.legend(fontsize="small")


def _parts(panel: "Axes", breakdowns: Sequence[Breakdown]) -> None:
    """Draw one bar per policy, with the milliseconds of its parts."""
    names = [each.policy for each in breakdowns]
    left = [0.0] * len(breakdowns)
    for part in breakdowns[0].medians_ms():
        widths = [each.medians_ms()[part] for each in breakdowns]
        panel.barh(names, widths, left=left, label=part)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    panel.invert_yaxis()
    panel.set(title="parts of a step", xlabel="ms")
    panel.legend(fontsize="small")
