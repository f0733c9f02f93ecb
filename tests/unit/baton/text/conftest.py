"""The sample model's tokenizer, converted once for all tests of this package; and how its property tests run."""

from pathlib import Path

import pytest
from hypothesis import settings

from baton.text.gguf_tokenizer import write_tokenizer
from baton.text.tokenizer import Tokenizer
from tests.support.models.tokenizers import sentencepiece_core, smollm_gguf, write_folder

# Examples are the same in every run, and may take their time: other work shares the cores.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


@pytest.fixture(scope="session")
def smollm_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("smollm")
    write_tokenizer(smollm_gguf(), folder)
    return folder


@pytest.fixture(scope="session")
def smollm(smollm_folder: Path) -> Tokenizer:
    return Tokenizer.load(smollm_folder)


@pytest.fixture(scope="session")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write_folder(tmp_path_factory.mktemp("sentencepiece"), sentencepiece_core()))
