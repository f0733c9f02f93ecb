"""A request's length is bounded by the slot and by the model, whichever is less."""

import json
from pathlib import Path

import pytest

from baton.clock import SystemClock
from deploy.config.file import make_local_config
from deploy.groups.cluster import LocalCluster
from deploy.machine.limits import tokens_of_slot

CONTEXT = 512
CONFIG = {
    "model_type": "llama",
    "vocab_size": 97,
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


@pytest.mark.parametrize(("slot", "expected"), [(100, 100), (CONTEXT, CONTEXT), (8192, CONTEXT)])
def test_the_smaller_bound_holds(folder: Path, slot: int, expected: int) -> None:
    assert tokens_of_slot(folder, slot) == expected


async def test_a_local_cluster_offers_no_more_than_the_model_takes(folder: Path) -> None:
    assert LocalCluster(make_local_config({}), folder, SystemClock()).max_tokens == CONTEXT
