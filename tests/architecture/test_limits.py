"""Each bound of `baton.limits` is used by the product."""

import re
from typing import get_type_hints

import pytest

from baton import limits
from baton.limits import Limit
from tests.support.folders import ROOT

PRODUCT = ("baton", "orchestrator", "generate_workers", "gateway", "deploy")
LIMITS = [name for name, hint in get_type_hints(limits, include_extras=True).items() if hasattr(hint, "__metadata__")]


@pytest.fixture(scope="module")
def words() -> set[str]:
    """Words of the product's modules, but for the limits' own."""
    paths = (path for folder in PRODUCT for path in (ROOT / folder).rglob("*.py") if path.name != "limits.py")
    return {word for path in paths for word in re.findall(r"\w+", path.read_text())}


@pytest.mark.parametrize("name", LIMITS)
def test_a_limit_is_used(name: str, words: set[str]) -> None:
    assert name in words


def test_each_limit_is_described() -> None:
    described = get_type_hints(limits, include_extras=True)
    assert len(LIMITS) == sum(name.isupper() and not name.startswith("_") for name in vars(limits))
    assert all(isinstance(described[name].__metadata__[0], Limit) for name in LIMITS)
