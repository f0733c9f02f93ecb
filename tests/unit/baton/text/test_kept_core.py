"""Workers load the core of a tokenizer as transformers made it, without transformers."""

import json
import logging
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from baton.errors import ModelError
from baton.text.kept_core import load_core
from baton.text.tokenizer import Tokenizer
from tests.support.models.tiny_tokenizer import write_letters
from tests.support.models.tokenizers import sentencepiece_core, write_folder

pytestmark = pytest.mark.integration

TEXT = "a quick brown fox"


@pytest.fixture
def folder(cache: Path, tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    return write_letters(tmp_path / "model")


@pytest.fixture(params=["letters", "sentencepiece", "smollm"])
def any_folder(request: pytest.FixtureRequest, smollm_folder: Path, cache: Path, tmp_path: Path) -> Path:
    if request.param == "smollm":
        return Path(shutil.copytree(smollm_folder, tmp_path / "model"))
    (tmp_path / "model").mkdir()
    if request.param == "letters":
        return write_letters(tmp_path / "model")
    return write_folder(tmp_path / "model", sentencepiece_core())


def kept(cache: Path) -> list[Path]:
    return sorted((cache / "baton" / "tokenizers").glob("*"))


def test_a_kept_core_is_that_of_the_whole_tokenizer(any_folder: Path, cache: Path) -> None:
    """The second load reads what the first one kept, with what tokenizer_config.json adds to tokenizer.json."""
    folder, path = any_folder, any_folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    number = str(Tokenizer.load(folder).vocab_size)
    config.setdefault("added_tokens_decoder", {})[number] = {"content": "<|late|>", "special": True}
    path.write_text(json.dumps(config))
    whole, first, second = Tokenizer.load(folder), load_core(folder), load_core(folder)
    assert isinstance(first, Tokenizer) and not isinstance(second, Tokenizer) and len(kept(cache)) == 1
    for each in (first, second):
        assert each.to_json() == whole.to_json() and each.has_tokens_of(whole)
        ids = each.encode(f"{TEXT}<|late|>")
        assert ids == whole.encode(f"{TEXT}<|late|>") and each.decode(ids) == whole.decode(ids)
        assert each.silent_tokens(["<|late|>"]) == whole.silent_tokens(["<|late|>"])


def test_a_changed_folder_is_loaded_again(folder: Path, cache: Path) -> None:
    load_core(folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "model_max_length": 7}))
    before = kept(cache)
    assert isinstance(load_core(folder), Tokenizer) and not isinstance(load_core(folder), Tokenizer)
    assert len(kept(cache)) == 1 and kept(cache) != before


def test_damage_and_a_cache_that_cannot_be_written_cost_only_time(
    folder: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    load_core(folder)
    (path,) = kept(cache)
    content = path.read_text()
    path.write_text(content[:100])
    with caplog.at_level(logging.WARNING):
        assert load_core(folder).decode(load_core(folder).encode(TEXT)) == TEXT
    assert "cannot be read from the cache" in caplog.text and path.read_text() == content
    path.unlink()
    path.parent.rmdir()
    path.parent.write_text("no folder")
    with caplog.at_level(logging.WARNING):
        assert load_core(folder).encode(TEXT)
    assert "cannot be kept in the cache" in caplog.text


def test_a_folder_without_a_tokenizer_is_refused(cache: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no tokenizer.json"):
        load_core(tmp_path / "nothing")
    assert not kept(cache)


def test_workers_do_not_import_transformers(folder: Path) -> None:
    load_core(folder)
    code = (
        "import sys; import generate_workers.host as host; from pathlib import Path; "
        "host.load_core(Path(sys.argv[1])); print('transformers' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code, str(folder)], check=True, capture_output=True, text=True)
    assert run.stdout.split() == ["False"]
