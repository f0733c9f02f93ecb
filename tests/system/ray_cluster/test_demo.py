"""`make demo` as a user runs it, without a terminal: it prints real text, and leaves nothing running, however it
ends."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from baton.modeling.checkpoints.weights import load_decoder
from baton.sampling_params import SamplingParams
from baton.text.tokenizer import Tokenizer
from baton_lab.demo.requests import QUESTIONS
from tests.support.clusters.on_ray.ray_clusters import processes_of, share_measurements, shared_files
from tests.support.folders import ROOT
from tests.support.models.reference import check_equal_tokens
from tests.support.models.texts import passage_ids

pytestmark = pytest.mark.cluster

WITHIN_S = 220


@pytest.fixture
def passage(smollm2: Path, tmp_path: Path) -> Path:
    path = tmp_path / "passage.txt"
    path.write_text(Tokenizer.load(smollm2).decode(passage_ids(smollm2, 200)).strip())
    return path


@contextmanager
def running(cache: Path, passage: Path, *assignments: str) -> Iterator["subprocess.Popen[str]"]:
    """The demo; it has ended afterwards, and has left nothing."""
    command = [sys.executable, "-m", "baton_lab.demo.show", str(passage)]
    command += [part for each in ("model.dtype=float32", *assignments) for part in ("--set", each)]
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache), "COLUMNS": "120", "PYTHONUNBUFFERED": "1"}
    share_measurements(cache)
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, cwd=ROOT, env=environment, text=True, stdout=pipe, stderr=pipe)
    try:
        yield process
    finally:
        process.terminate()
        process.communicate(timeout=WITHIN_S)
    assert not _processes_with(f"XDG_CACHE_HOME={cache}")
    assert not shared_files(cache)
    assert not list((cache / "baton" / "clusters").glob("*"))


@pytest.mark.ci
def test_demo_shows_it_all_and_leaves_nothing(smollm2: Path, tmp_path: Path, passage: Path) -> None:
    with running(tmp_path, passage, f"model.name={smollm2}") as process:
        shown = _shown_until(process, lambda line: "starting 3 workers" in line)
        ray_folder = _ray_folder(tmp_path)
        rest, error = process.communicate(timeout=WITHIN_S)
    assert (process.returncode, error) == (0, "")
    _check_continuation(shown + rest, passage.read_text(), smollm2)
    assert all(question in rest for question in QUESTIONS)
    assert rest.count("commit, 1st token") == 2  # of the passage, and of the slowest of eight questions at once
    assert len(re.findall(r"rank \d layers", rest)) >= 2  # on a crowded machine one rank may take each of them
    assert ["generate-0", "yes", "16", "16", "0"] in [line.split() for line in rest.splitlines()]
    assert not processes_of(ray_folder) and not Path(ray_folder).exists()


@pytest.mark.parametrize(
    "phase",
    [
        pytest.param("starting Ray", marks=pytest.mark.ci),
        *(
            pytest.param(each, marks=pytest.mark.nightly)
            for each in ("starting 3", "A chat", "streams at once", "Shutting down")
        ),
    ],
)
def test_ctrl_c_leaves_nothing(smollm2: Path, tmp_path: Path, passage: Path, phase: str) -> None:
    with running(tmp_path, passage, f"model.name={smollm2}") as process:
        _shown_until(process, lambda line: phase in line)
        ray_folder = _ray_folder(tmp_path)
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=WITHIN_S)
    assert (process.returncode, error) == (130, "demo: ended by SIGINT; nothing is left\n")
    assert not processes_of(ray_folder) and not Path(ray_folder).exists()


def test_what_cannot_be_is_one_line(smollm2: Path, tmp_path: Path, passage: Path) -> None:
    with running(tmp_path, passage, f"model.name={smollm2}", "prefill.cores=[[0],[77]]") as process:
        _, error = process.communicate(timeout=WITHIN_S)
    assert process.returncode == 2
    assert error.startswith("demo: cores: pinned to [77]") and error.count("\n") == 1


def _shown_until(process: "subprocess.Popen[str]", is_it: Callable[[str], bool]) -> str:
    assert process.stdout is not None
    shown = ""
    for line in process.stdout:
        shown += line
        if is_it(line):
            return shown
    raise AssertionError(f"ended early: {shown}")


def _check_continuation(shown: str, passage: str, model: Path) -> None:
    """What was streamed after the passage is what one process would have said."""
    text = shown.partition(passage[-100:])[2].partition(" prompt tokens")[0].rpartition("\n")[0]
    tokenizer = Tokenizer.load(model)
    prompt, whole = tokenizer.encode(passage), tokenizer.encode(passage + text)
    assert len(whole) - len(prompt) > 50
    params = SamplingParams(max_tokens=64)
    check_equal_tokens(load_decoder(model, dtype="float32"), prompt, whole[len(prompt) :], params)


def _ray_folder(cache: Path) -> str:
    (record,) = (cache / "baton" / "clusters").glob("demo-*.json")
    return str(json.loads(record.read_text())["ray_folder"])


def _processes_with(variable: str) -> list[str]:
    """Command lines of living processes that have it in their environment."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if variable.encode() in (process / "environ").read_bytes().split(b"\0"):
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue  # ended while we looked
    return found
