"""Reads the fields of a config.json, with type checks.

The families' `read` methods use it when a model is loaded. Does not import torch.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from baton.errors import ModelError


class Fields:
    """Fields of a config.json. A null value counts as a missing field. `generation` is the content of
    generation_config.json, or None.

    All methods raise ModelError with a one-line message: file (`source`), field, problem and remedy.
    """

    def __init__(self, raw: Mapping[str, object], source: str, generation: Mapping[str, object] | None = None) -> None:
        self.raw = raw
        self.source = source
        self._generation = generation or {}

    def error(self, field: str, problem: str, remedy: str = "correct the file, or choose another model") -> ModelError:
        return ModelError(f"{self.source}: {field}: {problem}; {remedy}")

    def replaced(self, field: str, value: object) -> "Fields":
        """Return a copy of the fields in which `field` has another value."""
        return Fields({**self.raw, field: value}, self.source, self._generation)

    def number(self, field: str, default: float | None = None) -> float:
        """Return the value of a field that must be a number above 0. Raises ModelError for any other value, and if the
        field is missing and there is no default."""
        value = self._get(field, default)
        if value is None:
            raise self.error(field, "is missing", "add it, or download the model again")
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise self.error(field, f"{value!r} is not a number above 0")
        return float(value)

    def count(self, field: str, default: int | None = None) -> int:
        """Return the value of a field that must be a whole number above 0. Raises ModelError for any other value, and
        if the field is missing and there is no default."""
        value = self.number(field, default)
        if not value.is_integer():
            raise self.error(field, f"{value!r} is not a whole number")
        return int(value)

    def refuse(self, field: str, remedy: str) -> None:
        """Raise ModelError if a field of an unsupported feature is set. Null, false, 0 and empty values count as not
        set."""
        if self.raw.get(field):
            raise self.error(field, f"{self.raw[field]!r} is not supported", remedy)

    def optional_count(self, field: str) -> int | None:
        return None if self.raw.get(field) is None else self.count(field)

    def flag(self, field: str, default: bool = False) -> bool:
        value = self._get(field, default)
        if not isinstance(value, bool):
            raise self.error(field, f"{value!r} is neither true nor false")
        return value

    def choice(self, field: str, known: Iterable[str], default: str | None = None) -> str:
        """Return the value of a field, or `default` if the field is missing. Raises ModelError unless the result is one
        of the texts in `known`."""
        value = self._get(field, default)
        if not isinstance(value, str) or value not in known:
            raise self.error(field, f"{value!r} is not supported", f"choose a model that uses {' or '.join(known)}")
        return value

    def _get(self, field: str, default: object) -> object:
        value = self.raw.get(field)
        return default if value is None else value

    def head_dim(self, hidden_size: int, num_heads: int) -> int:
        """Return `hidden_size` divided by `num_heads`. Raises ModelError if the result is not a whole number."""
        if hidden_size % num_heads:
            raise self.error("num_attention_heads", f"{num_heads} does not divide hidden_size {hidden_size}")
        return hidden_size // num_heads

    def eos_token_ids(self) -> tuple[int, ...]:
        """Return the end-of-sequence token ids. The ids in generation_config.json take precedence over those in
        config.json."""
        value = self._generation.get("eos_token_id")
        if value is None:
            value = self.raw.get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(token_id, int) and not isinstance(token_id, bool) and token_id >= 0 for token_id in ids):
            raise self.error("eos_token_id", f"{value!r} is neither a token id nor a list of token ids")
        return tuple(ids)

    def bos_token_id(self) -> int | None:
        value = self.raw.get("bos_token_id")
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise self.error("bos_token_id", f"{value!r} is not a token id")
        return value


def read_json(path: Path) -> dict[str, object]:
    """Return the JSON object in a file. Raises ModelError if the file cannot be read or is not a JSON object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror}); give the path of a model folder") from error
    except ValueError as error:
        raise ModelError(f"{path}: is not JSON ({error}); download the model again") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: is not a JSON object; download the model again")
    return value
