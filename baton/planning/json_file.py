"""Reads and writes JSON files that contain a kind and a schema version.

Error messages name the file, the field and the remedy. Files are written atomically.
"""

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from baton.errors import ConfigError
from baton.process.whole_files import whole


@contextlib.contextmanager
def naming(where: str) -> Iterator[None]:
    """Return a context manager that adds `where` to the beginning of the message of a ConfigError raised in its
    block."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def read(path: Path, kind: str) -> str:
    """Return the text of a file. `kind` describes the file in error messages. Raises ConfigError if the file cannot be
    read."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}): give the path of a {kind} file") from error
    except ValueError as error:
        raise ConfigError(f"{path}: is not valid UTF-8 ({error}): recreate the file") from error


def parse(text: str, kind: str, schema: int) -> dict[str, Any]:
    """Return the JSON object in `text`. Raises ConfigError if the text is not JSON, or if its kind or schema version is
    not the given one."""
    try:
        data = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"is not valid JSON ({error}): recreate the file") from error
    if not isinstance(data, dict) or data.get("kind") != kind:
        raise ConfigError(f'is not a {kind} file ("kind" is not "{kind}"): give another path')
    if data.get("schema") != schema:
        raise ConfigError(f"schema = {data.get('schema')!r}, and this version reads {schema}: recreate the file")
    return data


def dump(kind: str, schema: int, fields: dict[str, Any]) -> str:
    """Return JSON text with the given kind, schema version and fields. `parse` reads this text."""
    return json.dumps({"kind": kind, "schema": schema, **fields}, indent=1, allow_nan=False) + "\n"


def write(path: Path, text: str) -> None:
    """Write `text` to a file, and replace an existing file atomically. Raises ConfigError if the file's folder cannot
    be written to."""
    try:
        with whole(path) as partial:
            partial.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror}): choose a folder that can") from error


def number(data: dict[str, Any], name: str) -> float:
    """Return the field `name` of `data`, which must be a finite number. Raises ConfigError if the field is missing or
    invalid."""
    value = data.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
        raise ConfigError(f"{name} = {value!r} is not a number: give one")
    return float(value)


def text(data: dict[str, Any], name: str) -> str:
    """Return the field `name` of `data`, which must be a non-empty string. Raises ConfigError if the field is missing
    or invalid."""
    value = data.get(name)
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{name} = {value!r} is not a text: give a name")
    return value


def section(data: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the field `name` of `data`, which must be a JSON object. Raises ConfigError if the field is missing or is
    not an object."""
    value = data.get(name)
    if not isinstance(value, dict):
        raise ConfigError(f"{name} = {value!r} is not an object: give its fields")
    return value
