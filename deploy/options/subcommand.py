"""Adds a command with a description and examples to the command line, and formats the help of options."""

import argparse
from collections.abc import Callable


class DefaultsFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Appends its default to the help of each option. None, False and an empty list are not shown."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        has_default = action.default not in (None, []) and action.default is not False
        return super()._get_help_string(action) if has_default else action.help


def add_command(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]",
    run: Callable[[argparse.Namespace], int],
    name: str,
    text: str,
    description: str,
    *,
    examples: str = "",
) -> argparse.ArgumentParser:
    """Add the command `name`, which `run` executes, and return its parser. `text` is the command's line in the list of
    commands. The command's own help shows the description above the options and the examples below them, both without
    reflowing."""
    shown = argparse.RawDescriptionHelpFormatter
    parser = commands.add_parser(name, help=text, description=description, epilog=examples, formatter_class=shown)
    parser.set_defaults(run=run)
    return parser
