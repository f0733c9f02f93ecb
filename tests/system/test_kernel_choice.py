"""New processes choose the same kernels, even next to a busy core. Later processes read the stored choice."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.modeling.kernels import native
from tests.support.kernels.paths import require

pytestmark = pytest.mark.integration

NUM_PROCESSES = 20


def ask(cache: Path, code: str) -> str:
    """Return what a new process with that cache folder prints."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    run = subprocess.run([sys.executable, "-c", code], env=environment, text=True, capture_output=True, timeout=300)
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


@contextlib.contextmanager
def busy_core() -> Iterator[None]:
    spinning = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        spinning.kill()
        spinning.wait()


@pytest.mark.nightly
@pytest.mark.parametrize("tiles", [True, False])
def test_fresh_processes_make_one_choice(tiles: bool, tmp_path: Path) -> None:
    require(native.NATIVE)
    code = f"from baton.modeling.kernels.choosing import measure_choice; print(measure_choice(tiles={tiles}))"
    choices = []
    for number in range(NUM_PROCESSES):
        cache = tmp_path / str(number)
        with busy_core() if number % 2 else contextlib.nullcontext():
            choices.append(ask(cache, code))
    assert len(set(choices)) == 1, choices


@pytest.mark.ci
def test_a_later_process_reads_the_choice_of_the_first(tmp_path: Path) -> None:
    require(native.NATIVE)
    code = "from baton.modeling.kernels.process_kernels import KERNELS; print(KERNELS.choice)"
    first = ask(tmp_path, code)
    (kept,) = (tmp_path / "baton" / "kernels").glob("choice-*.json")
    before_ns = kept.stat().st_mtime_ns
    assert ask(tmp_path, code) == first
    assert kept.stat().st_mtime_ns == before_ns
    other = {**json.loads(kept.read_text()), "torch_rows": 7}  # which is never measured
    kept.write_text(json.dumps(other))
    assert ask(tmp_path, code).endswith("from 7 rows on by torch")
