"""Prefix stores for tests: a folder in memory that must be left clean, and prefixes to put there."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from modeling.kv_buffers import KvBuffer
from prefill_workers.prefix_store import PrefixStore
from tests.support.chains import until


def mapped(folder: Path) -> list[str]:
    """This process's mappings of files in `folder`, removed ones too."""
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if str(folder) in line]


@contextmanager
def prefix_folder() -> Iterator[Path]:
    """In memory, as a node's is. Nothing may be left mapped, or lie there under a name that no test gave."""
    with TemporaryDirectory(dir="/dev/shm", prefix="baton-test-") as made:
        folder = Path(made)
        yield folder
        until(lambda: not mapped(folder), 5.0)
        assert {each.name for each in folder.iterdir()} <= {"p", "q"}


def keep(store: PrefixStore, kv: KvBuffer, name: str = "p") -> None:
    """Writes all layers and seals them."""
    with store.create(name, len(kv.tokens)) as writer:
        for layer in range(kv.layout.num_layers):
            writer.write(layer, kv.export(layer, kv.tokens))
        writer.seal()
