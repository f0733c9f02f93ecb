"""Plot of the results of `benchmarks.speculation`: the speedup by speculation over context length, and the throughput
over the time per token."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Cell:
    """Measurements for one batch size and context."""

    batch: int
    context: int
    best: float
    """Speedup with the best fixed number of drafts, compared with steps without speculation."""
    auto: float
    """Speedup with `speculation = auto`, which plans the number of drafts of each step, compared with steps without
    speculation."""
    plain_rate: float
    """Tokens per second of all sequences together, without speculation."""
    auto_rate: float
    """Tokens per second of all sequences together, with `speculation = auto`."""


def draw(cells: Sequence[Cell], path: Path) -> None:
    """Draw a PNG with two panels. The left one shows the speedup over context length. The right one shows tokens per
    second over the time per token."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.0, 4.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for at, batch in enumerate(sorted({cell.batch for cell in cells})):
        mine = sorted((cell for cell in cells if cell.batch == batch), key=lambda cell: cell.context)
        contexts, label = [cell.context for cell in mine], f"batch {batch}"
        left.plot(contexts, [cell.auto for cell in mine], "o-", color=f"C{at}", label=label)
        left.plot(contexts, [cell.best for cell in mine], "x:", color=f"C{at}")
    for at, context in enumerate(sorted({cell.context for cell in cells})):
        mine = sorted((cell for cell in cells if cell.context == context), key=lambda cell: cell.batch)
        label = f"{context} tokens"
        plain = [1e3 * cell.batch / cell.plain_rate for cell in mine]
        planned = [1e3 * cell.batch / cell.auto_rate for cell in mine]
        right.plot(planned, [cell.auto_rate for cell in mine], "o-", color=f"C{at}", label=label)
        right.plot(plain, [cell.plain_rate for cell in mine], "x:", color=f"C{at}")
    left.axhline(1.0, color="grey", linewidth=0.8)
    left.set(xlabel="tokens of context", ylabel="times the tokens/s of plain steps", xscale="log")
    ticks = sorted({cell.context for cell in cells})
    left.set_xticks(ticks, [str(tick) for tick in ticks])
    left.minorticks_off()
    left.set_title("solid: planned (auto); dotted: the best fixed number of drafts", fontsize="small")
    right.set(xlabel="time per token of a stream, ms", ylabel="tokens/s of all streams")
    right.set_title("solid: planned (auto); dotted: plain steps", fontsize="small")
    for panel in (left, right):
        panel.grid(visible=True, alpha=0.3)
        panel.legend(fontsize="small")
    figure.savefig(path, format="png", dpi=120)
