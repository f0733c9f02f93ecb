"""All bounds that clients can meet are in `baton.limits`, and each is used by the product."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_type_hints

import pytest

from baton import limits
from baton.limits import Limit
from tests.support.folders import ROOT

PRODUCT = ("baton", "orchestrator", "generate_workers", "gateway", "deploy")
DOORS = ("gateway", "orchestrator/api", "baton/text", "baton/transport/channel.py")
"""Code that reads what clients send."""
NOT_OF_CLIENTS = {
    ("baton/text/detokenizer.py", "_MAX_PENDING_TOKENS"),  # of a character that is incomplete
    ("gateway/console/feed.py", "MAX_CALLERS"),  # of a cache that is filled again
    ("gateway/door/access.py", "_MAX_KEPT"),  # the same
}
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


def _bounds(path: Path) -> Iterator[str]:
    """Yield the names of constants of a module that look like bounds, and its literal bounds on lengths."""
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                if name.lstrip("_").startswith("MAX_"):
                    yield name
            case ast.keyword(arg="max_length", value=value) if not isinstance(value, ast.Name):
                yield f"max_length={ast.unparse(value)}"


def test_doors_have_no_bounds_of_their_own() -> None:
    paths = [
        path for door in DOORS for path in ([ROOT / door] if door.endswith(".py") else (ROOT / door).rglob("*.py"))
    ]
    found = {(str(path.relative_to(ROOT)), name) for path in paths for name in _bounds(path)}
    assert found == NOT_OF_CLIENTS, "move them to baton/limits.py"
