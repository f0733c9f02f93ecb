"""Reads a ClusterConfig from a TOML file and `--set a.b=c`, and prints one as TOML that explains itself.

Every mistake of a user is a ConfigError of one line: which key, which value, what to do.
"""

import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from baton.errors import ConfigError
from deploy.config.cluster import ClusterConfig


def load_config(path: Path | None, assignments: Sequence[str] = ()) -> ClusterConfig:
    """Read the configuration: the file, if any, with each `a.b=value` of `assignments` put over it, in order. Raises
    ConfigError."""
    raw: dict[str, Any] = _read(path) if path is not None else {}
    for assignment in assignments:
        _assign(raw, assignment)
    try:
        return ClusterConfig.model_validate(raw)
    except ValidationError as error:
        raise ConfigError(_explain(error)) from error


def format_config(config: ClusterConfig) -> str:
    """Return the configuration as TOML, with the meaning above each value; `load_config` reads it back."""
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
        raise ConfigError(f"--set {assignment!r} is no assignment: write it as section.field=value")
    section = raw
    for name in keys[:-1]:
        section = section.setdefault(name, {})
        if not isinstance(section, dict):
            raise ConfigError(f"--set {assignment!r}: {name} is no section: see `baton config` for all keys")
    section[keys[-1]] = _value(value.strip())


def _value(text: str) -> Any:
    """Return the TOML value of a text; a text that is none (a bare word, a path) is a string."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return parsed["value"] if parsed.keys() == {"value"} else text


def _explain(error: ValidationError) -> str:
    first, *others = error.errors()
    more = f" (and {len(others)} more)" if others else ""
    return _explain_one(first) + more


def _explain_one(detail: ErrorDetails) -> str:
    where = ".".join(str(part) for part in detail["loc"]) or "configuration"
    if detail["type"] == "extra_forbidden":
        known = ", ".join(_section(detail["loc"][:-1]).model_fields)
        return f"{where} is no key: use one of {known}"
    if detail["type"] == "value_error":  # raised by a section as a whole: its text is complete
        return f"{where}: {detail['ctx']['error']}"
    if detail["type"] == "model_type":
        return f"{where} = {_shown(detail['input'])} is wrong: {where} is a section, set its keys"
    message = detail["msg"][:1].lower() + detail["msg"][1:]
    return f"{where} = {_shown(detail['input'])} is wrong: {message}"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _section(location: tuple[int | str, ...]) -> type[BaseModel]:
    section: type[BaseModel] = ClusterConfig
    names = iter(location)
    for name in names:
        annotation = section.model_fields[str(name)].annotation
        if get_origin(annotation) is dict:  # a table of sections, by a name that the user chose
            next(names)
            _, annotation = get_args(annotation)
        assert isinstance(annotation, type) and issubclass(annotation, BaseModel)
        section = annotation
    return section


def _lines(section: BaseModel, name: str) -> Iterator[str]:
    if name:
        yield f"\n# {(type(section).__doc__ or '').splitlines()[0]}\n[{name}]"
    values = {field: getattr(section, field) for field in type(section).model_fields}
    yield from _assignments(section, {key: value for key, value in values.items() if not _sections(key, value)})
    for key, value in values.items():
        for place, nested in _sections(key, value).items():
            yield from _lines(nested, f"{name}.{place}" if name else place)


def _sections(key: str, value: Any) -> dict[str, BaseModel]:
    """Return the sections that a field holds, by their place: itself, or those of a table of sections. Empty for a
    plain value or an empty table."""
    if isinstance(value, BaseModel):
        return {key: value}
    return {f"{key}.{each}": nested for each, nested in value.items()} if isinstance(value, dict) else {}


def _assignments(section: BaseModel, values: Mapping[str, Any]) -> Iterator[str]:
    for key, value in values.items():
        yield f"# {type(section).model_fields[key].description}"
        yield f"{key} = {json.dumps(value, default=str)}"  # JSON of strings, numbers and lists is TOML
