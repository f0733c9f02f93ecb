"""Kinds of speculation with which whole systems are tested: fields of EngineConfig, by name."""

from collections.abc import Mapping
from typing import Any

import pytest

SPECULATING: Mapping[str, Mapping[str, Any]] = {
    "off": {"speculation": "off"},
    "auto": {"speculation": "auto"},
    "streaming": {"speculation": "streaming", "draft_tokens": 3, "draft_keys": 32},
    "snapkv": {"speculation": "snapkv", "draft_tokens": 3, "draft_keys": 32},
    "ngram": {"speculation": "ngram", "draft_tokens": 3},
    "auto host": {"speculation": "auto", "residency": "host", "draft_keys": 32},
    "streaming host": {"speculation": "streaming", "residency": "host", "draft_tokens": 3, "draft_keys": 32},
}
"""Settings by name. Drafts attend to few keys, so that some drafts are rejected."""


def ways(*names: str, ci: tuple[str, ...] = ()) -> list[Any]:
    """Return the parameters of a test: names in SPECULATING. Names in `ci` are marked as part of CI."""
    return [*names, *(pytest.param(name, marks=pytest.mark.ci) for name in ci)]
