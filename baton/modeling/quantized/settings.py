"""Settings that several formats of quantised weights share.

The formats in this folder read their configuration with it when a model is loaded.
"""

import re

from baton.modeling.families.fields import Fields


def read_group_size(fields: Fields, name: str) -> int | None:
    """Return the number of inputs of a group. None for -1, which means that all inputs are one group. Raises
    ModelError."""
    return None if fields.raw.get(name) == -1 else fields.count(name)


def read_block(fields: Fields, name: str) -> tuple[int, int] | None:
    """Return the numbers of outputs and inputs of a block. None if the field is absent or null. Raises ModelError."""
    block = fields.raw.get(name)
    if block is None:
        return None
    if isinstance(block, str) and re.fullmatch(r"\d+x\d+", block):  # as early versions of compressed-tensors wrote it
        block = [int(size) for size in block.split("x")]
    if isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block):
        return block[0], block[1]
    raise fields.error(name, f"{block!r} is not a list of two whole numbers above 0")


def check_pattern(fields: Fields, name: str, pattern: str) -> str:
    """Return `pattern`, a value of the field `name`. Raises ModelError if it is not a regular expression."""
    try:
        re.compile(pattern)
    except re.error as error:
        raise fields.error(name, f"{pattern!r} is not a regular expression ({error})") from error
    return pattern


def described_groups(group_size: int | None) -> str:
    """Return the grouping of inputs as readable text."""
    return "one group" if group_size is None else f"groups of {group_size}"
