"""Builds and loads the kernels in C++: at first use, once for each source, torch and processor, into the user's cache.

Without a compiler, or on a processor that lacks their instructions, there are none, and torch's own take their place.
Blocks while it builds (half a minute); processes that want the same kernel wait for the one that builds it. Torch is
imported only when it is needed: a launcher need not have it, nor wait for it.
"""

import fcntl
import functools
import hashlib
import importlib.metadata
import logging
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

from baton.process.whole_files import whole
from baton.settings.paths import cache_folder
from modeling.kernels.processor import cpu_flags, processor_kind

logger = logging.getLogger(__name__)

_ROOT = Path(__file__).parent
"""Folder of all sources, whose includes are relative to it."""
_FLAGS = ("-std=c++20", "-O3", "-ffp-contract=fast", "-fopenmp", "-fPIC", "-shared")

NAMES = (
    "products",
    "prefill_attention",
    "decode_attention",
    "key_selection",
    "partial_keys",
    "pool_notes",
    "hot_keys",
    "kv_int4",
    "linear",
    "rotary",
    "draws",
    "decode_layers",
)
"""Names of all kernels."""
NATIVE = "native"
INSTRUCTION_SETS = {
    NATIVE: ("-march=native", ()),
    "avx512": ("-march=x86-64-v4", ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")),
    "avx2": ("-march=x86-64-v3", ("avx2", "fma", "f16c", "bmi2", "movbe")),
    "plain": ("-march=x86-64", ("sse2",)),
}
"""Instruction sets that kernels are built for: the compiler's flag, and the features that the processor must have, as
/proc/cpuinfo names them. Product code uses NATIVE; the others let tests run kernels of other processors here."""


def load(name: str, instruction_set: str = NATIVE) -> bool:
    """Make the operators of <name>.cpp callable, as torch.ops.baton.*, or in the namespace of another of
    INSTRUCTION_SETS. Return False when the processor lacks that set, or they cannot be built: the log says why. A
    process tries each once."""
    return _is_loaded(name, instruction_set)


@functools.cache
def _is_loaded(name: str, instruction_set: str) -> bool:
    """Do `load`'s work once, however `load` is called: torch ends a process that loads an operator from two files, as
    it would after a change of the cache's folder."""
    if missing := lacking(instruction_set):
        logger.info("kernel %s: this processor lacks %s", name, ", ".join(sorted(missing)))
        return False
    try:
        _load(name, instruction_set)
    except (OSError, RuntimeError) as error:
        logger.warning("kernel %s cannot be built, torch's own is used: %s", name, str(error).strip().splitlines()[0])
        return False
    return True


def may_need_building() -> bool:
    """Return whether a first use here would build kernels or measure which are the fastest: a compiler and torch are
    installed, and files of these sources, torch and processor are missing."""
    if find_compiler() is None or not any(importlib.metadata.distributions(name="torch")):
        return False
    return not all(path.exists() for path in (choice_path(), *(_place(name, _flags(NATIVE)) for name in NAMES)))


def choice_path() -> Path:
    """Return the file of the kernels' choice: another one for another processor, torch, or source of any kernel."""
    sources = sorted(path for path in _ROOT.rglob("*") if path.suffix in (".cpp", ".h"))
    key = _key(sources, (*_flags(NATIVE), processor_kind()))
    return _folder() / f"choice-{key}.json"


def namespace(instruction_set: str) -> str:
    """Return the namespace of torch.ops that has the kernels built for an instruction set."""
    return "baton" if instruction_set == NATIVE else f"baton_{instruction_set}"


def _load(name: str, instruction_set: str) -> None:
    flags = _flags(instruction_set)
    library = _place(name, flags)
    library.parent.mkdir(parents=True, exist_ok=True)
    with library.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released by the end of this process, however it ends
        if not library.exists():
            _build(name, library, flags)
    import torch

    torch.ops.load_library(library)  # type: ignore[no-untyped-call]


def _build(name: str, library: Path, flags: tuple[str, ...]) -> None:
    """Build by one call of the compiler: torch's builder wants ninja, and when killed leaves a lock behind."""
    from torch.utils import cpp_extension  # imports setuptools

    compiler = find_compiler()
    if compiler is None:
        raise RuntimeError("there is no C++ compiler")
    logger.info("building kernel %s", name)
    includes = [f"-I{_ROOT}", *(f"-isystem{path}" for path in cpp_extension.include_paths())]
    links = [*(f"-L{path}" for path in cpp_extension.library_paths()), "-lc10", "-ltorch_cpu"]
    with whole(library) as made:
        run = subprocess.run(
            [compiler, *flags, *includes, str(_source(name)), *links, "-o", str(made)], text=True, capture_output=True
        )
        if run.returncode:
            raise RuntimeError(f"{compiler} failed: {_first_error(run.stderr)}")


def lacking(instruction_set: str) -> set[str]:
    """Return the features that kernels built for that set use and this processor lacks."""
    return set(INSTRUCTION_SETS[instruction_set][1]) - set(cpu_flags())


def find_compiler() -> str | None:
    """Return the path of a C++ compiler; None when there is none."""
    return shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")


def _first_error(text: str) -> str:
    lines = text.strip().splitlines() or ["no message"]
    return next((line for line in lines if "error" in line), lines[0])


def _flags(instruction_set: str) -> tuple[str, ...]:
    return (*_FLAGS, INSTRUCTION_SETS[instruction_set][0], f"-DBATON_OPERATORS={namespace(instruction_set)}")


def _place(name: str, flags: tuple[str, ...]) -> Path:
    """Return where the library is, or will be: another file for anything that could change the library."""
    sources = (_source(name), *sorted(_ROOT.rglob("*.h")))
    return _folder() / f"{name}-{_key(sources, (*flags, *cpu_flags()))}.so"


def _key(sources: Iterable[Path], words: Iterable[str]) -> str:
    """Return a hash of the files, torch's version and the words."""
    parts = (
        *(each.read_bytes() for each in sources),
        importlib.metadata.version("torch").encode(),
        " ".join(words).encode(),
    )
    return hashlib.blake2b(b"\0".join(parts), digest_size=8).hexdigest()


def _folder() -> Path:
    return cache_folder() / "kernels"


def _source(name: str) -> Path:
    """Return the file of a kernel: in the folder of the operation that it is a part of."""
    (path,) = _ROOT.glob(f"*/{name}.cpp")
    return path
