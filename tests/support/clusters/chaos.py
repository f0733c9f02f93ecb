"""Clusters of `baton chaos` whose workers run in the test's process. Faults also strike links and senders, and a worker
restarts within milliseconds. The orchestrator runs in a child process."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from baton.modeling.forward.decoder import Decoder
from baton.results.completion import ModelInfo
from baton.types import SampledToken
from baton_lab.chaos.cluster import ChaosCluster, ChaosPlan
from baton_lab.chaos.faults import SeededPlan
from baton_lab.chaos.schedule import Ask
from deploy.groups.keeper import OrchestratorPlan
from generate_workers.config import EngineConfig
from tests.support.clusters.clients import CLOCK, HOST
from tests.support.clusters.cluster import MAX_TOKENS
from tests.support.clusters.planners import linear_planner
from tests.support.clusters.supervision import CONFIG, IMPATIENT, NUM_RANKS
from tests.support.clusters.workers import InProcessSpawner, orchestrator_worker, tiny_worker
from tests.support.engines.prefixes import file_bytes, prefix_folder
from tests.support.models.reference import check_equal_tokens
from tests.support.models.tiny_tokenizer import EOS_ID, write_letters

_NUM_SLOTS = 6
_BLOCK_TOKENS = 16
_NUM_BLOCKS = 24
"""Number of blocks that a prefix store can hold: fewer than all prompts need together, so that blocks are evicted."""


class Reference:
    """Judge that compares an answer with the tokens that a single process generates. Implements Judge."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder

    def __call__(self, ask: Ask, choice: int, tokens: Sequence[SampledToken]) -> str:
        params = ask.params.of_choice(choice)
        ids = [token.token_id for token in tokens]
        try:
            check_equal_tokens(self.decoder, ask.prompt_ids, ids, params)
        except AssertionError as error:
            return str(error)
        return ""


@asynccontextmanager
async def chaos_cluster(
    folder: Path,
    *,
    num_groups: int = 2,
    generate: Mapping[str, Any] = MappingProxyType({}),
    emulates: bool = False,
) -> AsyncIterator[tuple[ChaosCluster, Reference]]:
    """Run a cluster with faults, and stop it at the end. `folder` receives the orchestrator's tokenizer. `generate`
    sets further fields of the generation groups' configuration. `emulates`: each worker computes on its own emulated
    device."""
    torch.set_num_threads(1)
    faults = SeededPlan()
    spawner = InProcessSpawner(is_emulated=emulates, faults=faults)
    decoder, engine = spawner.decoder, EngineConfig(_NUM_SLOTS, MAX_TOKENS, max_waiting=_NUM_SLOTS, **generate)
    worker = orchestrator_worker(write_letters(folder), replace(CONFIG, block_tokens=_BLOCK_TOKENS))

    def orchestrator(layout: str) -> OrchestratorPlan:
        model = ModelInfo("letters", MAX_TOKENS, decoder.config.vocab_size, "float32", False, layout)
        return OrchestratorPlan(worker, model, (EOS_ID,), linear_planner, HOST)

    with prefix_folder() as prefixes:
        spawner.folders = {"prefill": prefixes, "generate": prefixes}
        spawner.prefix_bytes = _NUM_BLOCKS * file_bytes(decoder.layout, _BLOCK_TOKENS)
        plan = ChaosPlan(
            spawner=spawner,
            chain=[tiny_worker("prefill", rank) for rank in range(NUM_RANKS)],
            engines=[tiny_worker("generate", group=group, section=engine) for group in range(num_groups)],
            orchestrator=orchestrator,
            faults=faults,
            heartbeat=IMPATIENT,
            num_slots=_NUM_SLOTS,
            max_tokens=MAX_TOKENS,
        )
        async with ChaosCluster(plan, CLOCK, lambda line: None) as cluster:
            yield cluster, Reference(decoder)
