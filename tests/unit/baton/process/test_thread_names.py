"""Threads that the operating system knows by their names."""

import sys
import threading
from pathlib import Path

import pytest

from baton.process.thread_names import show_thread_name


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_thread_has_the_first_characters_of_its_name() -> None:
    shown: list[str] = []

    def live() -> None:
        show_thread_name()
        shown.append(Path(f"/proc/self/task/{threading.get_native_id()}/comm").read_text())

    thread = threading.Thread(target=live, name="a-name-of-many-characters")
    thread.start()
    thread.join()
    assert shown == ["a-name-of-many-\n"]
