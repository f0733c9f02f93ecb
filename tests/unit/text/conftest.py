"""Tokenizers of this package's tests, and how its property tests run."""

from pathlib import Path

import pytest
from hypothesis import settings

from tests.support.models.tokenizers import sentencepiece_core, write_folder
from text.tokenizer import Tokenizer

# Examples are the same in every run, and may take their time: other work shares the cores.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


@pytest.fixture(scope="session")
def smollm(smollm2: Path) -> Tokenizer:
    return Tokenizer.load(smollm2)


@pytest.fixture(scope="session")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write_folder(tmp_path_factory.mktemp("sentencepiece"), sentencepiece_core()))
