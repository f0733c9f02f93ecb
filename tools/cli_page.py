"""Generates the text of docs/reference/cli.md from the command line's parser. `tools.pages` writes the file."""

import argparse
from collections.abc import Iterator

from baton.settings.paths import cache_folder
from deploy.cli import GROUPS, build_parser

_HEAD = """\
# The command line

This page lists all commands and their options, in the order of `baton --help`. `python -m tools.pages` generates it.

A command that fails prints one line to standard error, with the error and a remedy.

| exit status | meaning |
|---|---|
| 0 | success |
| 1 | the command failed, or had one of the results that its description below names |
| 2 | an option or a setting is invalid |
| 130 | the command was interrupted by Ctrl-C. `serve`, `gateway` and `http` then end with 0 |

| term | meaning |
|---|---|
| cluster | an orchestrator and its groups of workers, started by `baton serve` |
| orchestrator | process that accepts requests and assigns them to groups |
| server | process that clients connect to: the orchestrator, or a gateway in front of it |
| prefill group, chain, rank | group of workers (ranks) that form a chain and compute a prompt together |
| generation group, engine | worker that generates tokens for a batch of sequences. It can also compute prompts |
| pool | all groups of one role: prefill or generation |
| KV | keys and values of attention |
| slot | place of one sequence and its KV in a generation group |
| residency | where KV is stored, and which keys generation attends to ([infinigen.md](../infinigen.md)) |
| setting | value of the configuration, like `generate.num_slots`. `baton config` lists all settings |
"""


def page() -> str:
    """Return the text of the page docs/reference/cli.md."""
    parser = build_parser()
    [commands] = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    texts = {each.dest: each.help or "" for each in commands._choices_actions}
    parts = [_HEAD]
    for group, names in GROUPS.items():
        rows = "\n".join(f"| [`baton {name}`](#baton-{name}) | {_cell(texts[name])} |" for name in names)
        parts.append(f"## {group.capitalize()}\n\n| command | what it does |\n|---|---|\n{rows}\n")
        parts += [_command(name, commands.choices[name]) for name in names]
    return "\n".join(parts)


def _command(name: str, parser: argparse.ArgumentParser) -> str:
    """Return the section of one command: its description, its options and its examples."""
    text = (parser.description or "").strip()
    is_raw = parser.formatter_class is argparse.RawDescriptionHelpFormatter
    parts = [f"### baton {name}\n", f"```text\n{text}\n```\n" if is_raw else f"{text}\n"]
    rows = "\n".join(_rows(parser))
    if rows:
        parts.append(f"| option | meaning |\n|---|---|\n{rows}\n")
    if parser.epilog:
        parts.append(f"```text\n{parser.epilog.strip()}\n```\n")
    return "\n".join(parts)


def _rows(parser: argparse.ArgumentParser) -> Iterator[str]:
    formatter = parser._get_formatter()
    for action in parser._actions:
        if action.dest == "help" or action.help == argparse.SUPPRESS:
            continue
        values = _values(action)
        names = ", ".join(action.option_strings) or values
        shown = f"`{names} {values}`" if values and action.option_strings else f"`{names}`"
        meaning = formatter._expand_help(action).replace(str(cache_folder()), "~/.cache/baton")
        yield f"| {_cell(shown)} | {_cell(meaning)} |"


def _values(action: argparse.Action) -> str:
    """Return the name of an option's value; empty for a switch."""
    if action.nargs == 0:
        return ""
    if action.choices is not None:
        return "{" + ",".join(map(str, action.choices)) + "}"
    metavar = action.metavar or action.dest.upper()
    return " ".join(metavar) if isinstance(metavar, tuple) else metavar


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
