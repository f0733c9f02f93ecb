"""JSON files with a schema number: read with errors that name file, field and remedy; written whole or not at all."""

import json
import sys
import uuid
from pathlib import Path
from typing import Any

from baton.errors import ConfigError


def read(path: Path, kind: str, schema: int) -> dict[str, Any]:
    """The file's object. Raises ConfigError if it cannot be read, is no JSON, or is of another kind or schema."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}): give the path of a {kind} file") from error
    except ValueError as error:
        raise ConfigError(f"{path}: is no text ({error}): write it anew") from error
    return parse(text, kind, schema, str(path))


def parse(text: str, kind: str, schema: int, where: str) -> dict[str, Any]:
    """A file's text, as `read`; `where` names it in errors."""
    try:
        data = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{where}: is no JSON ({error}): write it anew") from error
    if not isinstance(data, dict) or data.get("kind") != kind:
        raise ConfigError(f'{where}: is no {kind} file ("kind" is not "{kind}"): give another path')
    if data.get("schema") != schema:
        raise ConfigError(
            f"{where}: schema = {data.get('schema')!r}, and this version reads {schema}: write the file anew"
        )
    return data


def dump(kind: str, schema: int, fields: dict[str, Any]) -> str:
    """The text of a file, which `parse` reads."""
    return json.dumps({"kind": kind, "schema": schema, **fields}, indent=1, allow_nan=False) + "\n"


def write(path: Path, text: str) -> None:
    """Replaces the file in one step. Raises ConfigError when the folder cannot be written to."""
    partial = path.with_name(f"{path.name}.{uuid.uuid4().hex}.partial")  # another writer's is another file
    try:
        try:
            partial.write_text(text, encoding="utf-8")
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror}): choose a folder that can") from error


def number(data: dict[str, Any], name: str, where: str) -> float:
    """A finite number. Raises ConfigError for a missing field, or something else."""
    value = data.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
        raise ConfigError(f"{where}: {name} = {value!r} is no number: give one")
    return float(value)


def text(data: dict[str, Any], name: str, where: str) -> str:
    """A text that says something. Raises ConfigError for a missing field, or something else."""
    value = data.get(name)
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{where}: {name} = {value!r} is no text: give a name")
    return value


def section(data: dict[str, Any], name: str, where: str) -> dict[str, Any]:
    """A nested object. Raises ConfigError for a missing field, or something else."""
    value = data.get(name)
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: {name} = {value!r} is no object: give its fields")
    return value
