"""Loads the C++ kernels, which setup.py builds when Baton is installed.

A build contains one library for each source folder and instruction set. A process uses the best built instruction set
that its processor supports. If none is supported, torch's own operators are used instead. Torch is imported only when
it is needed, so launchers work without it.
"""

import functools
import hashlib
import importlib.metadata
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from baton.modeling.kernels.instruction_sets import SETS, usable_sets
from baton.modeling.kernels.processor import processor_kind
from baton.settings.paths import cache_folder

if TYPE_CHECKING:
    from baton.modeling.kernels.calls.operators import Operators

logger = logging.getLogger(__name__)

FOLDERS = ("attention", "layers", "linear", "sampling", "sparse")
"""Folders with the sources of the kernels. Each folder is built into a library of the same name."""
NATIVE = "native"
"""Alias for the best instruction set that is built and that this processor supports."""
BUILD = "python setup.py build_ext --inplace"
"""Command that builds the kernels in a source checkout."""
_BUILT = Path(__file__).parent / "built"


def load(instruction_set: str = NATIVE) -> bool:
    """Load the kernels of an instruction set, and return True if they are loaded. `instruction_set` is NATIVE or a key
    of SETS. Return False if the kernels are not built or this processor does not support them. The log then gives the
    reason. A process tries each set only once."""
    try:
        operators(instruction_set)
    except OSError as error:
        _warn(str(error))
        return False
    return True


def operators(instruction_set: str = NATIVE) -> "Operators":
    """Return the kernels of an instruction set. `instruction_set` is NATIVE or a key of SETS. Raises OSError if the
    kernels cannot be loaded."""
    kernels = _operators(instruction_set)
    if isinstance(kernels, OSError):
        raise kernels
    return kernels


@functools.cache
def _operators(instruction_set: str) -> "Operators | OSError":
    name = chosen_set() if instruction_set == NATIVE else instruction_set
    if name is None:
        return OSError(f"kernels are not built for this processor: torch's operators are used; {BUILD} builds them")
    if lacking(name):
        return OSError(f"this processor lacks {', '.join(sorted(lacking(name)))}")
    from baton.modeling.kernels.calls.library import Library
    from baton.modeling.kernels.calls.operators import Operators

    try:
        return Operators({folder: Library(library_path(folder, name)) for folder in FOLDERS})
    except OSError as error:
        return error


@functools.cache
def _warn(text: str) -> None:
    """Warn, once for each text."""
    logger.warning("%s", text)


def chosen_set() -> str | None:
    """Return the name of the best instruction set that is built and that this processor supports. None: no such set is
    built."""
    return next((each.name for each in usable_sets() if is_built(each.name)), None)


def is_built(instruction_set: str) -> bool:
    """Return True if all kernels are built for this instruction set."""
    return all(library_path(folder, instruction_set).exists() for folder in FOLDERS)


def library_path(folder: str, instruction_set: str) -> Path:
    """Return the library file with the kernels of a source folder for an instruction set."""
    return _BUILT / f"{folder}.{instruction_set}.so"


def lacking(instruction_set: str) -> set[str]:
    """Return the processor features that kernels for this instruction set require and this processor does not have."""
    usable = {each.name for each in usable_sets()}
    return set() if instruction_set in (NATIVE, *usable) else set(SETS[instruction_set].features)


def may_need_measuring() -> bool:
    """Return True if the first use of kernels on this machine would measure them. This is the case if kernels are
    built, torch is installed, and no choice is stored."""
    has_torch = any(importlib.metadata.distributions(name="torch"))
    return has_torch and chosen_set() is not None and not choice_path().exists()


def choice_path() -> Path:
    """Return the file in which the choice of kernels is stored. The file name depends on the processor, the version of
    torch and the build of every kernel."""
    name = chosen_set()
    libraries = () if name is None else tuple(library_path(folder, name) for folder in FOLDERS)
    parts = (*(each.read_bytes() for each in libraries), importlib.metadata.version("torch").encode())
    key = hashlib.blake2b(b"\0".join((*parts, processor_kind().encode())), digest_size=8).hexdigest()
    return _folder() / f"choice-{key}.json"


def _folder() -> Path:
    return cache_folder() / "kernels"
