"""A request's length is bounded by the slot and by the model, whichever is less."""

from pathlib import Path

import pytest

from baton.process.clock import SystemClock
from deploy.config.file import WrittenConfig
from deploy.groups.cluster import LocalCluster
from deploy.machine.limits import tokens_of_slot
from tests.support.models.config_folders import TINY, write_config

CONTEXT = TINY["max_position_embeddings"]


@pytest.mark.parametrize(("slot", "expected"), [(100, 100), (CONTEXT, CONTEXT), (8192, CONTEXT)])
def test_the_smaller_bound_holds(tmp_path: Path, slot: int, expected: int) -> None:
    assert tokens_of_slot(write_config(tmp_path), slot) == expected


async def test_a_local_cluster_offers_no_more_than_the_model_takes(tmp_path: Path) -> None:
    assert LocalCluster(WrittenConfig({}).local.config, write_config(tmp_path), SystemClock()).max_tokens == CONTEXT
