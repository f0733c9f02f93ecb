"""Priorities of threads, in a process of its own: one that gave way cannot take that back."""

import math
import subprocess
import sys
from pathlib import Path

import pytest

from baton.process.cores import cpu_quota

pytestmark = pytest.mark.integration

SCRIPT = """
import os, threading
from baton.process.cores import give_way_to

def nice():
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

def first():
    ready.set()
    done.wait()
    found.append(nice())
    child = threading.Thread(target=lambda: found.append(nice()))
    child.start()
    child.join()

ready, done, found = threading.Event(), threading.Event(), []
os.nice(3)
thread = threading.Thread(target=first)
thread.start()
ready.wait()
give_way_to(thread.native_id)
give_way_to(thread.native_id)
late = threading.Thread(target=lambda: found.append(nice()))
late.start()
late.join()
found.append(nice())
done.set()
thread.join()
print(found)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priorities of their own there")
def test_all_threads_give_way_to_one_and_to_those_that_it_starts() -> None:
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[13, 13, 3, 3]"  # two that came late or gave way, the first, and its own


@pytest.mark.parametrize(
    ("text", "cores"), [(None, math.inf), ("max 100000", math.inf), ("150000 100000", 1.5), ("5000 10000", 0.5)]
)
def test_a_containers_quota_is_a_number_of_cores(tmp_path: Path, text: str | None, cores: float) -> None:
    if text is not None:
        (tmp_path / "cpu.max").write_text(f"{text}\n")
    assert cpu_quota(tmp_path) == cores
