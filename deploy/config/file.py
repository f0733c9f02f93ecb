"""Reads a ClusterConfig from a TOML file and from `--set a.b=c`. Also prints a ClusterConfig as TOML, with a comment
above each value.

Each mistake of the user raises a ConfigError with one line of text that names the key, the value and the remedy.
"""

import json
import math
import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from baton.errors import ConfigError
from baton.settings.base import from_json, meaning_of, names_of
from deploy.config.cluster import ClusterConfig


@dataclass(frozen=True)
class WrittenConfig:
    """Values that the user has set in a file, by --set, and by options of a command. Values that are not set are not
    included."""

    sections: Mapping[str, Any]
    """Values that the user has set, by section and field name. A field that is missing has its default, or its value is
    chosen for the machine."""

    @cached_property
    def config(self) -> ClusterConfig:
        """Complete configuration, with defaults for all values that the user has not set. The first access raises
        ConfigError if a name or a value is not valid."""
        return from_json(ClusterConfig, json.dumps(self.sections, default=str))

    @property
    def local(self) -> "WrittenConfig":
        """Copy of this configuration for a cluster in one process tree (`baton local`). The name of the cluster
        contains this process's id. Unless the user has set orchestrator.disaggregation, it is set to "always": the
        prefill chain computes every prompt, so that the user can watch the chain."""
        given = self.sections.get("orchestrator", {})
        section = {"disaggregation": "always"} | given if isinstance(given, dict) else given
        return WrittenConfig({**self.sections, "orchestrator": section, "name": f"local-{os.getpid()}"})

    def writes(self, section: str, field: str) -> bool:
        """Return True if the user has set this field to another value than auto."""
        return bool(self.sections.get(section, {}).get(field, "auto") != "auto")

    def with_choices(self, config: ClusterConfig, choices: Mapping[str, Mapping[str, Any]]) -> ClusterConfig:
        """Return `config` with the values in `choices`, by section and field name. Fields that the user has set are not
        changed, except those that are set to auto."""
        chosen = {
            section: {field: value for field, value in fields.items() if not self.writes(section, field)}
            for section, fields in choices.items()
        }
        return replace(config, **{name: replace(getattr(config, name), **chosen[name]) for name in chosen})


def read_config(path: Path | None, assignments: Sequence[str] = ()) -> WrittenConfig:
    """Read the values that a configuration sets: first those of the file, if any, then each `a.b=value` of
    `assignments` in order. Later values override earlier ones. Raises ConfigError if the file or an assignment cannot
    be parsed. Names and values are not checked until `WrittenConfig.config` is used."""
    raw: dict[str, Any] = _read(path) if path is not None else {}
    for assignment in assignments:
        _assign(raw, assignment)
    return WrittenConfig(raw)


def load_config(path: Path | None, assignments: Sequence[str] = ()) -> ClusterConfig:
    """Read the configuration from the file, if given, and from assignments, and return it with defaults for all other
    values (see `read_config`). Raises ConfigError if the configuration is not valid."""
    return read_config(path, assignments).config


def format_config(config: ClusterConfig) -> str:
    """Return the configuration as TOML text that `load_config` can read. The description of each field is a comment
    above its value."""
    return "\n".join(_lines(config, "")).strip() + "\n"


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"config file {path} cannot be read ({error.strerror}): check its path") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"config file {path} is not UTF-8 (byte {error.start}): re-encode it") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"config file {path} is not TOML: {error}") from error


def _assign(raw: dict[str, Any], assignment: str) -> None:
    key, equals, value = assignment.partition("=")
    keys = key.strip().split(".")
    if not equals or not all(keys):
        raise ConfigError(f"--set {assignment!r} is not an assignment: write it as section.field=value")
    section = raw
    for name in keys[:-1]:
        section = section.setdefault(name, {})
        if not isinstance(section, dict):
            raise ConfigError(f"--set {assignment!r}: {name} is not a section: see `baton config` for all keys")
    section[keys[-1]] = _value(value.strip())


def _value(text: str) -> Any:
    """Return the TOML value of a text. A text that is not valid TOML (a bare word, a path) is returned as a string."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return parsed["value"] if parsed.keys() == {"value"} else text


def _lines(section: Any, name: str) -> Iterator[str]:
    if name:
        yield f"\n# {(type(section).__doc__ or '').splitlines()[0]}\n[{name}]"
    values = {name: getattr(section, name) for name in names_of(type(section))}
    for key, value in values.items():
        if not _sections(key, value):
            yield f"# {meaning_of(type(section), key)}"
            yield f"{key} = {_toml(value)}"
    for key, value in values.items():
        for place, nested in _sections(key, value).items():
            yield from _lines(nested, f"{name}.{place}" if name else place)


def _sections(key: str, value: Any) -> dict[str, Any]:
    """Return the sections that a field holds, by their key: the field itself, or the entries of a table of sections.
    Empty for a plain value or an empty table."""
    if is_dataclass(value):
        return {key: value}
    return {f"{key}.{each}": nested for each, nested in value.items()} if isinstance(value, dict) else {}


def _toml(value: Any) -> str:
    return "inf" if value == math.inf else json.dumps(value, default=str)  # JSON of all other values is TOML
