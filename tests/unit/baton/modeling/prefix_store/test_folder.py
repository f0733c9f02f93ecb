"""A node's folder exists while anybody uses it, however its users end. A folder of another user is never used."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from baton.errors import ConfigError
from baton.modeling.prefix_store import folder as store_folder
from baton.modeling.prefix_store.folder import StoreFolder, node_folder, remove_left, share_bytes, sweep

pytestmark = pytest.mark.integration


@pytest.fixture
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where node folders lie in this test."""
    monkeypatch.setattr(store_folder, "MEMORY", tmp_path)
    yield tmp_path
    assert list(tmp_path.iterdir()) == []


def test_the_last_user_removes_it(parent: Path) -> None:
    path = node_folder("c")
    first, second = StoreFolder(path), StoreFolder(path)
    (path / "block").write_text("kv")
    first.close()
    assert (path / "block").exists()
    second.close()
    assert not path.exists()


def test_a_folder_in_use_is_not_swept_and_one_that_was_left_is(parent: Path) -> None:
    used, left, stranger = StoreFolder(node_folder("used")), node_folder("left"), parent / "baton-of-others"
    left.mkdir(0o700)
    (left / "block").write_text("kv")
    stranger.mkdir()
    sweep(parent)
    assert used.path.exists() and stranger.exists() and not left.exists()
    used.close()
    stranger.rmdir()


def test_a_killed_user_holds_nothing(parent: Path) -> None:
    path = node_folder("c")
    program = f"""
import os, signal
from pathlib import Path
from baton.modeling.prefix_store.folder import StoreFolder
folder = StoreFolder(Path({str(path)!r}))
os.kill(os.getpid(), signal.SIGKILL)
"""
    killed = subprocess.run([sys.executable, "-c", program], check=False)
    assert killed.returncode == -9
    assert path.exists()
    sweep(parent)
    assert not path.exists()


def test_what_a_dying_user_holds_is_removed_once_it_lets_go(parent: Path) -> None:
    """The user is a process whose first thread has ended, like a killed one that is slow to end."""
    path = node_folder("c")
    program = f"""
import ctypes, sys, threading
from pathlib import Path
from baton.modeling.prefix_store.folder import StoreFolder
folder = StoreFolder(Path({str(path)!r}))
print("held", flush=True)
threading.Thread(target=lambda: (sys.stdin.read(), ctypes.CDLL(None)._exit(0))).start()
ctypes.CDLL(None).pthread_exit(None)  # ends this thread alone
"""
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as dying:
        assert dying.stdin is not None and dying.stdout is not None
        assert dying.stdout.readline() == b"held\n"
        remove_left(path, within_s=0.1)
        assert path.exists()
        removing = threading.Thread(target=remove_left, args=(path, 30.0))
        removing.start()
        dying.stdin.close()
        removing.join(30.0)
        assert not path.exists()


def test_what_is_left_under_a_name_is_taken_over(parent: Path) -> None:
    path = node_folder("c")
    path.mkdir(0o700)
    (path / "block").write_text("kv")
    folder = StoreFolder(path)
    assert (path / "block").exists()
    folder.close()


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file system of all users, as /dev/shm is."""
    with TemporaryDirectory(dir="/dev/shm", prefix="baton-test-") as made:
        Path(made).chmod(0o1777)
        monkeypatch.setattr(store_folder, "MEMORY", Path(made))
        yield Path(made)


@contextmanager
def user(uid: int) -> Iterator[None]:
    """Act as another user."""
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)


def plant(path: Path, kind: str) -> None:
    """Take the name of a folder, as its owner would not."""
    if kind == "link":
        target = path.with_name("target")
        target.mkdir(0o700)
        path.symlink_to(target)
    elif kind == "file":
        path.touch()
    else:
        path.mkdir()
        path.chmod(int(kind, 8))


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users")
OTHERS = [pytest.param((1, kind), marks=needs_root, id=f"another user's, {kind}") for kind in ("700", "777", "link")]
OPEN = [pytest.param((0, kind), id=f"this user's, {kind}") for kind in ("777", "710", "link", "file")]


@pytest.mark.parametrize("taken", [*OTHERS, *OPEN])
def test_a_folder_that_is_not_the_user_s_alone_is_not_used(shared: Path, taken: tuple[int, str]) -> None:
    by, kind = taken
    path = node_folder("c")
    with user(54321) if by else nullcontext():
        plant(path, kind)
    before = path.lstat()
    with user(54322) if by else nullcontext():
        first, second, other = (StoreFolder(path, key) for key in ("secret", "secret", "another"))
        assert path not in (first.path, other.path) and first.path == second.path != other.path
        assert (first.path.stat().st_uid, first.path.stat().st_mode & 0o777) == (os.geteuid(), 0o700)
        for folder in (first, second, other):
            folder.close()
        assert not first.path.exists()
    assert path.lstat() == before


@pytest.mark.parametrize("kind", ["700", "777"])
@needs_root
def test_sweeping_passes_over_what_others_own(shared: Path, kind: str) -> None:
    """Workers sweep as they start, and `baton stop` does at its end."""
    paths = [shared / f"baton-prefixes-54322-{name}" for name in "abc"]
    with user(54321):
        plant(paths[1], kind)
    with user(54322):
        for path in (paths[0], paths[2]):
            path.mkdir(0o700)
        sweep(shared)
        remove_left(paths[1], within_s=60.0)  # does not wait for it
    assert list(shared.iterdir()) == [paths[1]]


def test_a_folder_that_cannot_be_made_is_said(parent: Path) -> None:
    file = parent / "file"
    file.touch()
    with pytest.raises(ConfigError, match="set prefill.prefix_share to 0"):
        StoreFolder(file / "folder")
    file.unlink()


def test_shares_are_of_all_that_fits(parent: Path) -> None:
    assert share_bytes(0.0, parent) == 0
    assert 0 < 2 * share_bytes(0.25, parent) <= share_bytes(0.5, parent) + 1
    with pytest.raises(ConfigError, match="cannot be used"):
        share_bytes(0.5, parent / "nowhere")


def test_what_another_boot_left_on_disk_is_not_taken_over(
    parent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert node_folder("c", parent) == node_folder("c", parent)
    left = node_folder("c", parent)
    left.mkdir(0o700)
    (left / "block").write_text("perhaps zeros")
    boot = tmp_path / "boot_id"
    boot.write_text("another\n")
    monkeypatch.setattr(store_folder, "_BOOT_ID", boot)
    folder = StoreFolder(node_folder("c", parent))
    sweep(parent)
    assert folder.path.name.endswith("-c-another") and folder.path.exists() and not left.exists()
    folder.close()
    boot.unlink()
