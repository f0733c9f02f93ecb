"""Of kernels' grids, one case a path through the kernel belongs to `make test`; the others are marked `ci`."""

import re
import zlib
from collections import defaultdict
from pathlib import Path

import pytest

PATHS = ("case", "path", "make", "instruction_set", "select", "write", "operators")
"""Parameters that say which implementation runs: built for which instruction set, and how it multiplies."""
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
"""Text of an object without a text of its own; it differs in each process."""
GRIDS = (
    *("attention_kernels", "decode_kernels", "decode_layers", "key_selection", "linear", "partial_keys"),
    *("pool_notes", "rotary", "unpack_picked"),
)


@pytest.hookimpl(tryfirst=True)  # before marks select
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    groups: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.path.parent == Path(__file__).parent and item.path.stem.removeprefix("test_") in GRIDS:
            groups[_function_and_path(item)].append(item)
    for group, cases in groups.items():
        for case in cases:
            if case is not cases[zlib.crc32(group.encode()) % len(cases)]:
                case.add_marker(pytest.mark.ci)


def _function_and_path(item: pytest.Item) -> str:
    callspec = getattr(item, "callspec", None)
    params = {} if callspec is None else callspec.params
    path = {name: _ADDRESS.sub("", str(params[name])) for name in PATHS if name in params}
    return f"{item.path.stem} {getattr(item, 'originalname', item.name)} {path}"
