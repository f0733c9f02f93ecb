"""Workers load the core of a tokenizer as transformers made it, without transformers."""

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from baton.errors import ModelError
from baton.text.kept_core import load_core
from baton.text.tokenizer import Tokenizer
from tests.support.models.tiny_tokenizer import write_letters

pytestmark = pytest.mark.integration

TEXT = "a quick brown fox"


@pytest.fixture
def folder(cache: Path, tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    return write_letters(tmp_path / "model")


def kept(cache: Path) -> list[Path]:
    return sorted((cache / "baton" / "tokenizers").glob("*"))


def test_a_kept_core_is_that_of_the_whole_tokenizer(folder: Path, cache: Path) -> None:
    """The second load reads what the first one kept, with what tokenizer_config.json adds to tokenizer.json."""
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["added_tokens_decoder"] = {"97": {"content": "<|late|>", "special": True}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
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
    assert isinstance(load_core(folder), Tokenizer) and len(kept(cache)) == 2


def test_damage_and_a_cache_that_cannot_be_written_cost_only_time(
    folder: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    load_core(folder)
    (path,) = kept(cache)
    content = path.read_text()
    path.write_text(content[:100])
    with caplog.at_level(logging.WARNING):
        assert load_core(folder).decode(load_core(folder).encode(TEXT)) == TEXT
    assert "is written again" in caplog.text and path.read_text() == content
    path.unlink()
    path.parent.rmdir()
    path.parent.write_text("no folder")
    with caplog.at_level(logging.WARNING):
        assert load_core(folder).encode(TEXT)
    assert "is not kept in the cache" in caplog.text


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
