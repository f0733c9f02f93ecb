"""One file of a model's weights for all processes of a node gives the same logits. Its faults are repaired."""

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from baton.modeling.checkpoints import shared_weights
from baton.modeling.checkpoints.weights import load_decoder
from baton.modeling.forward.decoder import Decoder
from tests.support.models.quantised_folders import write_pair
from tests.support.models.tiny_models import build_tiny
from tests.support.paths import advance, buffer_for
from tests.support.sysfs import Shape

FAMILIES = (
    *("llama_sharded", "llama_biases", "qwen2", "qwen3", "opt_350m", "opt_galactica", "falcon_40b", "phi3_long"),
    *("phi4_mini", "gemma3_scaled", "qwen3_moe"),
)
TOKENS = list(range(2, 42))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own, for weights of any size."""
    monkeypatch.setattr(shared_weights, "cache_folder", lambda: tmp_path / "cache")
    monkeypatch.setattr(shared_weights, "LEAST_BYTES", 0)
    return tmp_path / "cache" / "weights"


@torch.inference_mode()
def logits(decoder: Decoder) -> Tensor:
    buffer = buffer_for(decoder, len(TOKENS) + 1)
    prompt = advance(decoder, buffer, TOKENS, 0)
    return torch.cat((prompt, advance(decoder, buffer, [5], len(TOKENS))))


def files(cache: Path) -> list[Path]:
    return sorted(path for path in cache.iterdir() if path.suffix != ".lock")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", FAMILIES)
def test_all_families_give_the_same_logits(name: str, dtype: str, tmp_path: Path, cache: Path) -> None:
    build_tiny(name, tmp_path / "model")
    own = load_decoder(tmp_path / "model", dtype=dtype)
    for _ in range(2):  # written, and then only mapped
        shared = load_decoder(tmp_path / "model", dtype=dtype, shared=True)
        assert torch.equal(logits(shared), logits(own))
        assert shared.weights.fingerprint == own.weights.fingerprint
        assert (shared.weights.embedding is shared.weights.head) == (own.weights.embedding is own.weights.head)
    assert len(files(cache)) == 1


@pytest.mark.parametrize("weights", ["stored", "bfloat16", "int8"])
def test_all_forms_of_quantised_weights(weights: str, tmp_path: Path, cache: Path) -> None:
    folder = write_pair(tmp_path, "awq").quantised
    own = load_decoder(folder, dtype="bfloat16", weights=weights)
    for _ in range(2):
        assert torch.equal(logits(load_decoder(folder, dtype="bfloat16", weights=weights, shared=True)), logits(own))
    assert len(files(cache)) == 1


def test_a_checkpoint_that_changed_is_loaded_again(tmp_path: Path, cache: Path) -> None:
    folder = tmp_path / "model"
    before = load_after(build_tiny, "qwen2", folder)
    (old,) = files(cache)
    (folder / "model.safetensors").unlink()
    after = load_after(build_tiny, "llama_biases", folder)
    assert files(cache) == [old]
    assert before.weights.fingerprint != after.weights.fingerprint
    assert torch.equal(logits(after), logits(load_decoder(folder)))


def load_after(build: object, name: str, folder: Path) -> Decoder:
    assert callable(build)
    build(name, folder)
    return load_decoder(folder, shared=True)


def test_files_of_folders_that_are_gone_are_removed(tmp_path: Path, cache: Path) -> None:
    load_after(build_tiny, "qwen2", tmp_path / "old")
    (tmp_path / "old").rename(tmp_path / "new")
    load_decoder(tmp_path / "new", shared=True)
    assert [path.name.partition("-")[0] for path in files(cache)] == ["new"]


def test_each_numa_node_has_a_file_of_its_own(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that are bound to a node share its file. Those that are not bound share another one."""
    nodes, cpus = Shape(2, 2).nodes(tmp_path / "sys"), set[int]()
    monkeypatch.setattr(shared_weights, "read_nodes", lambda: nodes)
    monkeypatch.setattr(shared_weights, "usable_cpus", lambda: cpus)
    build_tiny("qwen2", tmp_path / "model")
    expected = logits(load_decoder(tmp_path / "model"))
    for bound in ({0, 1}, {2}, {3}, {1, 2}):
        cpus.clear()
        cpus.update(bound)
        assert torch.equal(logits(load_decoder(tmp_path / "model", shared=True)), expected)
    names = [path.name.split("-")[2:] for path in files(cache)]
    assert names == [[], ["node0"], ["node1"]]


class Evil:
    """Pickled as a call of a function."""

    def __init__(self, function: str) -> None:
        self._function = function

    def damage(self, content: bytes) -> bytes:
        header, _, rest = content.partition(b"\n")
        module, _, name = self._function.partition(":")
        evil = b"\x80\x04" + pickle.SHORT_BINUNICODE + bytes([len(module)]) + module.encode()
        evil += pickle.SHORT_BINUNICODE + bytes([len(name)]) + name.encode() + pickle.STACK_GLOBAL + b"."
        return header + b"\n" + evil + rest[len(evil) :]


@pytest.mark.parametrize(
    ("damage", "warning"),
    [
        (lambda content: b"{}\n", ""),
        (lambda content: content[:-100], ""),
        (lambda content: content.replace(b"RmsNorm", b"RmsGone"), "is damaged"),
        (Evil("subprocess:Popen").damage, "subprocess.Popen is not allowed"),
        (Evil("baton.modeling.hosting:os.system").damage, "os.system is not allowed"),
        (Evil("baton.modeling.checkpoints.shared_weights:Path").damage, "Path is not allowed"),
    ],
)
def test_a_damaged_file_is_replaced(
    damage: Callable[[bytes], bytes], warning: str, tmp_path: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = logits(load_after(build_tiny, "qwen2", tmp_path / "model"))
    (path,) = files(cache)
    content = path.read_bytes()
    path.with_name(f"{path.name}.left.partial").touch()  # by a process that was killed
    path.write_bytes(damage(content))
    for _ in range(2):
        assert torch.equal(logits(load_decoder(tmp_path / "model", shared=True)), expected)
    assert path.read_bytes() == content
    assert files(cache) == [path]
    assert warning in caplog.text and caplog.text.count("is damaged") == bool(warning)


def test_without_disk_or_folder_each_worker_has_its_own(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    build_tiny("qwen2", tmp_path / "model")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
        load_decoder(tmp_path / "model", shared=True)
    assert files(cache) == [] and "twice as much free disk space" in caplog.text
    cache.with_name("file").touch()
    monkeypatch.setattr(shared_weights, "cache_folder", lambda: cache.with_name("file"))
    load_decoder(tmp_path / "model", shared=True)
    assert "cannot be shared" in caplog.text
