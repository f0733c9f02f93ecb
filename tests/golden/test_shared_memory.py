"""The weights of the standard model lie once in memory, however many processes of a node have loaded them."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from baton.modeling.checkpoints.catalog import resolve_model
from baton.text.gguf_tokenizer import write_tokenizer
from tests.conftest import MODEL_CACHE

pytestmark = pytest.mark.integration

WORKER = """
import sys
from pathlib import Path
import torch
from baton.modeling.checkpoints.weights import load_decoder
from tests.support.paths import advance, buffer_for
decoder = load_decoder(Path(sys.argv[1]), dtype="bfloat16", shared=True)
with torch.inference_mode():
    advance(decoder, buffer_for(decoder, 9), list(range(9)), 0)
print("ready", flush=True)
sys.stdin.read()
"""
"""Loads the model, reads all of its weights, and waits until its input ends."""


@contextmanager
def workers(folder: Path, cache: Path, count: int) -> Iterator[list[int]]:
    """Yield the ids of processes that have loaded the model. They start at the same time."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    command = [sys.executable, "-c", WORKER, str(folder)]
    pipe = subprocess.PIPE
    with ExitStack() as stack:
        started = [
            stack.enter_context(subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True))
            for _ in range(count)
        ]
        try:
            for process in started:
                assert process.stdout is not None and process.stdout.readline() == "ready\n"
            yield [process.pid for process in started]
        finally:
            for process in started:
                assert process.stdin is not None
                process.stdin.close()


def sizes(pid: int, path: Path) -> dict[str, int]:
    """The bytes of a process's mapping of a file, by kind: Rss, Pss, and so on."""
    found: dict[str, int] = {}
    is_file = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        first, *rest = line.split()
        if not first.endswith(":"):
            is_file = rest[-1] == str(path)
        elif is_file and rest[-1] == "kB":
            found[first[:-1]] = found.get(first[:-1], 0) + int(rest[0]) * 1024
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_two_workers_hold_the_weights_once(tmp_path: Path) -> None:
    folder = resolve_model("smollm2-135m", cache=MODEL_CACHE, progress=lambda done, total: None, finish=write_tokenizer)
    with workers(folder, tmp_path, 2) as pids:
        (path,) = (each for each in (tmp_path / "baton" / "weights").iterdir() if each.suffix != ".lock")
        mapped = [sizes(pid, path) for pid in pids]
        total = path.stat().st_size
    for each in mapped:
        assert each["Rss"] > 0.9 * total, "all weights were read"
        assert each["Anonymous"] == 0, "no page was copied"
    assert sum(each["Pss"] for each in mapped) <= total
