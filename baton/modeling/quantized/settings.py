"""Functions that read configuration fields which several formats of quantised weights have in common.

The formats in this folder use them when a model is loaded.
"""

import re

from baton.modeling.families.fields import Fields


def read_group_size(fields: Fields, name: str) -> int | None:
    """Read the number of inputs of a group from the configuration field `name`. Return None for -1, which means that
    all inputs are one group. Raises ModelError for an invalid value."""
    return None if fields.raw.get(name) == -1 else fields.count(name)


def read_block(fields: Fields, name: str) -> tuple[int, int] | None:
    """Read the size of a block, (outputs, inputs), from the configuration field `name`. Return None if the field is
    missing or null. Raises ModelError for an invalid value."""
    block = fields.raw.get(name)
    if block is None:
        return None
    if isinstance(block, str) and re.fullmatch(r"\d+x\d+", block):  # as early versions of compressed-tensors wrote it
        block = [int(size) for size in block.split("x")]
    if isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block):
        return block[0], block[1]
    raise fields.error(name, f"{block!r} is not a list of two whole numbers above 0")


def check_pattern(fields: Fields, name: str, pattern: str) -> str:
    """Check that `pattern`, a value of the configuration field `name`, is a valid regular expression, and return it.
    Raises ModelError otherwise."""
    try:
        re.compile(pattern)
    except re.error as error:
        raise fields.error(name, f"{pattern!r} is not a regular expression ({error})") from error
    return pattern


def described_groups(group_size: int | None) -> str:
    """Return a readable description of the group size, for messages. None: all inputs are one group."""
    return "one group" if group_size is None else f"groups of {group_size}"
