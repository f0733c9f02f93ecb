"""Loads the kernels in C++, which setup.py builds when Baton is installed.

A build consists of a library for each folder of sources and each instruction set. Of the sets that are built, a process
uses the best one that its processor supports. If none is supported, torch's own operators are used instead. Torch is
imported only when it is needed: a launcher works without it and does not wait for its import.
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
"""Folders of sources, which are also the names of the libraries built from them."""
NATIVE = "native"
"""Name for the best instruction set that is built and that this processor supports."""
BUILD = "python setup.py build_ext --inplace"
"""Command that builds the kernels in a checkout."""
_BUILT = Path(__file__).parent / "built"


def load(instruction_set: str = NATIVE) -> bool:
    """Return whether `operators` can be called: whether kernels are built for that set, one of SETS or NATIVE, and this
    processor supports it. If not, the log gives the reason. A process tries each set once."""
    try:
        operators(instruction_set)
    except OSError as error:
        _warn(str(error))
        return False
    return True


def operators(instruction_set: str = NATIVE) -> "Operators":
    """Return the kernels of an instruction set. Raises OSError if `load` would return False."""
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
    """Return the best instruction set that is built and that this processor supports. None: no such set is built."""
    return next((each.name for each in usable_sets() if is_built(each.name)), None)


def is_built(instruction_set: str) -> bool:
    """Return whether kernels are built for that set."""
    return all(library_path(folder, instruction_set).exists() for folder in FOLDERS)


def library_path(folder: str, instruction_set: str) -> Path:
    """Return the file of a folder's kernels for an instruction set."""
    return _BUILT / f"{folder}.{instruction_set}.so"


def lacking(instruction_set: str) -> set[str]:
    """Return the features that kernels built for that set use and this processor lacks."""
    usable = {each.name for each in usable_sets()}
    return set() if instruction_set in (NATIVE, *usable) else set(SETS[instruction_set].features)


def may_need_measuring() -> bool:
    """Return whether the first use on this machine would measure kernels: they are built, torch is installed, and no
    measurement is kept."""
    has_torch = any(importlib.metadata.distributions(name="torch"))
    return has_torch and chosen_set() is not None and not choice_path().exists()


def choice_path() -> Path:
    """Return the file of the choice of kernels. Its name depends on the processor, torch's version and the build of
    every kernel."""
    name = chosen_set()
    libraries = () if name is None else tuple(library_path(folder, name) for folder in FOLDERS)
    parts = (*(each.read_bytes() for each in libraries), importlib.metadata.version("torch").encode())
    key = hashlib.blake2b(b"\0".join((*parts, processor_kind().encode())), digest_size=8).hexdigest()
    return _folder() / f"choice-{key}.json"


def _folder() -> Path:
    return cache_folder() / "kernels"
