"""Terminal output that several commands share: tables of numbers, and progress bars."""

import contextlib
from collections.abc import Callable, Iterator, Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table


def number_table(title: str, headings: Sequence[str], words: str = "") -> Table:
    """Return an empty table whose columns are right-aligned, for numbers. The column with the heading `words` is
    left-aligned."""
    table = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 1, 0, 0))
    for heading in headings:
        table.add_column(heading, justify="left" if heading == words else "right")
    return table


@contextlib.contextmanager
def progress(console: Console, what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a progress bar for work of `total` units, if the console is a terminal. Yields a function that advances the
    bar by a number of units. The bar is drawn only during calls of this function, not by a separate thread, because a
    drawing thread would disturb time measurements."""
    columns = (TextColumn(what), BarColumn(), TextColumn("{task.percentage:.0f} %"), TimeRemainingColumn())
    is_off = not console.is_terminal
    with Progress(*columns, console=console, transient=True, auto_refresh=False, disable=is_off) as bar:
        task = bar.add_task("", total=total)

        def advance(amount: int) -> None:
            bar.advance(task, amount)
            bar.refresh()

        yield advance


@contextlib.contextmanager
def late_progress(console: Console, what: str, *columns: ProgressColumn) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar with the description `what`, followed by `columns`. Yields a function that updates the bar.
    Its arguments are the number of units done and the total number. The bar appears at the first update. Several
    threads may call the function."""
    bar = Progress(TextColumn("{task.description}"), BarColumn(), *columns, console=console, transient=True)
    task = bar.add_task(what, total=None)

    def show(done: int, total: int) -> None:
        bar.start()
        bar.update(task, completed=done, total=total)

    try:
        yield show
    finally:
        if bar.live.is_started:
            bar.stop()
