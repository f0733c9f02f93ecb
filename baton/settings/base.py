"""Base of all settings classes: frozen dataclasses whose fields have a type, a default, limits and a docstring. Values
are validated when an object is created.

Classes decorated with `@settings` are validated by pydantic, without implicit conversions. An invalid value raises
ConfigError, which names the field, the value and the remedy. Docstrings of fields are shown to users as descriptions.
The settings of a role form a section of the cluster's configuration file. They are sent to the role's processes as
JSON.
"""

import dataclasses
import functools
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast, dataclass_transform, get_args, get_origin

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass
from pydantic_core import ErrorDetails

from baton.errors import ConfigError
from baton.settings.byte_sizes import parse_bytes, parse_rate

Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Bytes = Annotated[int, BeforeValidator(parse_bytes), Field(ge=0)]
"""Number of bytes. It may be given as an integer, or as text like "1.5GiB"."""
ByteRate = Annotated[int, BeforeValidator(parse_rate), Field(ge=0)]
"""Number of bytes per second. It may be given as an integer, or as text like "25GBps"."""


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().absolute()) if path else ""


AbsolutePath = Annotated[str, AfterValidator(_absolute)]
"""Path that is converted to an absolute path, because the processes of a cluster have different working folders. May be
empty."""

T = TypeVar("T")
_CONFIG = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True, ser_json_inf_nan="constants")
_UNKNOWN, _NO_SECTION = "unexpected_keyword_argument", "dataclass_type"
_MAX_SHOWN = 80


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field, Field))
def settings(cls: type[T]) -> type[T]:
    """Convert a class to a frozen dataclass whose fields are validated. Creating an object with an invalid value raises
    ConfigError. Used as a decorator."""
    made: Any = dataclass(frozen=True, config=_CONFIG)(cls)
    names = [field.name for field in dataclasses.fields(made) if not field.kw_only]
    check = made.__init__

    @functools.wraps(check)
    def make(self: Any, *args: Any, **values: Any) -> None:
        try:
            check(self, *args[len(names) :], **dict(zip(names, args, strict=False)), **values)
        except ValidationError as error:
            raise ConfigError(_explain(error, made)) from error

    made.__init__ = make
    return cast(type[T], made)


def from_json(cls: type[T], text: str | bytes) -> T:
    """Create settings of the class `cls` from JSON text. Raises ConfigError, which names the first invalid field."""
    try:
        return TypeAdapter(cls).validate_json(text)
    except ValidationError as error:
        raise ConfigError(_explain(error, cls)) from error


def to_json(values: Any) -> str:
    """Return settings as one line of JSON, which `from_json` can read."""
    return TypeAdapter(type(values)).dump_json(values).decode()


def values_of(cls: type[Any], settings: Any) -> dict[str, Any]:
    """Return the values of the fields that the class `cls` has, by name. `settings` is an object of `cls` or of a
    subclass."""
    assert isinstance(settings, cls)
    return {field.name: getattr(settings, field.name) for field in dataclasses.fields(cls)}


def part_of(cls: type[T], settings: T) -> T:
    """Return an object of the class `cls` with the values of `settings`, which is an object of a subclass. Fields that
    only the subclass has are omitted."""
    return cls(**values_of(cls, settings))


def names_of(cls: type[Any]) -> list[str]:
    """Return the names of a settings class's fields in display order. Fields of the class itself come before inherited
    fields."""
    names = dict.fromkeys(name for base in cls.__mro__ for name in vars(base).get("__annotations__", {}))
    return [name for name in names if name in cls.__dataclass_fields__]


def meaning_of(cls: type[Any], name: str) -> str:
    """Return the docstring of the field `name` of a settings class."""
    declared: Any = next(base for base in cls.__mro__ if name in vars(base).get("__annotations__", {}))
    return str(declared.__pydantic_fields__[name].description or "")


def _explain(error: ValidationError, cls: type[Any]) -> str:
    first, *others = error.errors()
    more = f" (and {len(others)} more)" if others else ""
    return _explain_one(first, cls) + more


def _explain_one(detail: ErrorDetails, cls: type[Any]) -> str:
    where = ".".join(str(part) for part in detail["loc"])
    if detail["type"] == _UNKNOWN:
        known = ", ".join(names_of(_settings_at(cls, detail["loc"][:-1])))
        return f"{where} is not a key: use one of {known}"
    if detail["type"] == "missing":
        return f"{where} is missing: set it"
    if detail["type"] == "value_error":  # raised by a section as a whole: its text is complete
        return f"{where}: {detail['ctx']['error']}" if where else str(detail["ctx"]["error"])
    if detail["type"] == _NO_SECTION:
        return f"{where} = {_shown(detail['input'])} is wrong: {where} is a section, set its keys"
    message = detail["msg"][:1].lower() + detail["msg"][1:]
    return f"{where or cls.__name__} = {_shown(detail['input'])} is wrong: {message}"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 3] + "..."


def _settings_at(cls: type[Any], location: tuple[int | str, ...]) -> type[Any]:
    """Return the class of the nested settings at a location, which is a path of field names and indices."""
    names = iter(location)
    for name in names:
        annotation: Any = cls.__pydantic_fields__[str(name)].annotation
        if get_origin(annotation) is dict:  # a table of sections, whose names the user chooses
            next(names)
            _, annotation = get_args(annotation)
        cls = annotation
    return cls
