"""Adds commands with a longer description to the command line, all in the same form."""

import argparse


def add_command(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]",
    name: str,
    text: str,
    description: str,
    examples: str = "",
) -> argparse.ArgumentParser:
    """Add the command of that name and return its parser. `text` is its line in the list of commands; its own help
    shows the description above its options and the examples below them, as they are written."""
    shown = argparse.RawDescriptionHelpFormatter
    return commands.add_parser(name, help=text, description=description, epilog=examples, formatter_class=shown)
