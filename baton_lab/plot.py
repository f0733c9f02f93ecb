"""Support for the option --plot of several commands. It checks the option before the command's work starts, and writes
the finished plot."""

from pathlib import Path
from typing import TYPE_CHECKING

from baton.errors import ConfigError, InvalidArgumentError
from baton_lab.extra import require

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def require_plots(path: Path) -> None:
    """Check that a plot can be made. Raises InvalidArgumentError if `path` does not end in .png, and ConfigError if
    matplotlib is not installed."""
    if path.suffix != ".png":
        raise InvalidArgumentError(f"--plot = {str(path)!r}: the plot is a PNG: give a name that ends in .png")
    require("matplotlib", "--plot")


def write_plot(figure: "Figure", title: str, path: Path) -> None:
    """Write the figure as a PNG file, with a title and grids. Raises ConfigError if the file cannot be written."""
    for panel in figure.axes:
        panel.grid(visible=True, alpha=0.3)
    figure.suptitle(title, fontsize="medium")
    try:
        figure.savefig(path, format="png", dpi=120)
    except OSError as error:
        remedy = "choose another path"
        raise ConfigError(f"--plot = {str(path)!r} cannot be written ({error.strerror}): {remedy}") from error
