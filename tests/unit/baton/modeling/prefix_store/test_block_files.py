"""A block's file that cannot be made, or cannot go: it is said, and nothing of it stays behind."""

import resource
from pathlib import Path

import pytest

from baton.errors import ConfigError
from baton.modeling.prefix_store.block_files import UNSEALED, BlockWriter, remove_unlocked
from baton.types import KvLayout, TokenRange

LAYOUT = KvLayout("model", 3, 2, 4, "float32")


def open_files(folder: Path) -> list[str]:
    """Open files of this process in `folder`, removed ones included."""
    links = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    return [target for link in links if (target := str(link.readlink())).startswith(str(folder))]


def test_a_file_that_may_not_be_so_long_is_not_left(folder: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, hard))
    try:
        with pytest.raises(ConfigError, match="File too large"):
            BlockWriter(folder / "a", LAYOUT, TokenRange(0, 5), 0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(folder.iterdir())
    assert not open_files(folder)


def test_a_file_that_cannot_be_removed_is_let_go(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    writer = BlockWriter(folder / "a", LAYOUT, TokenRange(0, 5), 0)
    (unsealed,) = folder.glob(UNSEALED + "*")
    unsealed.unlink()
    unsealed.mkdir()
    assert len(open_files(folder)) == 1
    writer.drop()
    assert not open_files(folder)
    assert not remove_unlocked(unsealed)
    assert caplog.text.count("cannot be removed") == 2
    unsealed.rmdir()
