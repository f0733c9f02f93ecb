"""Ten minutes of prompts on a prefix store that is much too small. The store never exceeds its limit, and tokens are
exact.

Cache hints are often wrong here: blocks are evicted for other prompts while a request is planned, and between two
rounds the test removes or truncates blocks.
"""

import asyncio
import random
import time
from pathlib import Path

import pytest

from baton.modeling.prefix_store.store import PrefixStore
from baton.sampling_params import SamplingParams
from orchestrator.requests.config import OrchestratorConfig
from tests.support.clusters.cluster import BareCluster, cluster
from tests.support.engines.generation import prompt, reference_ids
from tests.support.engines.prefixes import file_bytes, prefix_folder, sealed_blocks_in
from tests.support.models.tiny_models import random_decoder

pytestmark = pytest.mark.integration

SOAK_S = 600.0
BLOCK = 16
NUM_BLOCKS = 12
CONFIG = OrchestratorConfig(block_tokens=BLOCK)
PARAMS = SamplingParams(max_tokens=3, ignore_eos=True)


async def ask(made: BareCluster, ids: tuple[int, ...]) -> int:
    """Cached tokens of a request whose tokens are right, at the first attempt."""
    answer = await made.ask(made.request(ids, PARAMS))
    assert answer.token_ids == reference_ids(made.decoder, ids, PARAMS)
    assert answer.end.usage.num_attempts == 1
    return answer.end.usage.num_cached_tokens


def vandalize(folder: Path, rng: random.Random) -> None:
    """Somebody who is not asked to: a block disappears, or loses its end."""
    names = sorted(sealed_blocks_in(folder))
    if names:
        path = folder / rng.choice(names)
        if rng.random() < 0.5:
            path.unlink(missing_ok=True)
        elif path.exists():
            path.chmod(0o600)
            with path.open("r+b") as file:
                file.truncate(path.stat().st_size // 2)


async def watch(store: PrefixStore, limit_bytes: int) -> int:
    """Looks until it is cancelled; how often it did."""
    num_looks = 0
    try:
        while True:
            with store.locked():
                assert store.holdings().num_bytes <= limit_bytes
            num_looks += 1
            await asyncio.sleep(0.01)  # not for anybody: a period
    except asyncio.CancelledError:
        return num_looks


@pytest.mark.nightly
@pytest.mark.timeout(SOAK_S + 120)
async def test_churn() -> None:
    rng, stems = random.Random(1), [prompt(96, seed=stem) for stem in range(4)]
    limit_bytes = NUM_BLOCKS * file_bytes(random_decoder().layout, BLOCK)
    num_cached = num_asked = 0
    with prefix_folder() as folder:
        folders = {"prefill": folder, "generate": folder}
        async with cluster(config=CONFIG, folders=folders, prefix_bytes=limit_bytes) as made:
            store = made.ranks[0].prefixes
            assert store is not None
            watching = asyncio.create_task(watch(store, limit_bytes))
            end_s = time.monotonic() + SOAK_S
            while time.monotonic() < end_s and not watching.done():
                ids = [(*rng.choice(stems)[: rng.randrange(1, 96)], *prompt(rng.randrange(1, 40), n)) for n in range(8)]
                num_cached += sum(await asyncio.gather(*(ask(made, each) for each in ids)))
                num_asked += len(ids)
                if rng.random() < 0.3:
                    vandalize(folder, rng)
            watching.cancel()
            assert await watching > 10
    assert num_cached > BLOCK * num_asked / 2
