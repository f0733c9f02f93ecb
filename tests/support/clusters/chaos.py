"""Clusters to be struck whose workers are real servers in this process: links and outlets fail, too, and a life takes
milliseconds. Their orchestrator is a process."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from baton.results.completion import ModelInfo
from baton.types import SampledToken
from deploy.chaos.cluster import ChaosCluster, ChaosPlan
from deploy.chaos.faults import SeededPlan
from deploy.chaos.network import HOST
from deploy.chaos.schedule import Ask
from deploy.groups.keeper import OrchestratorPlan
from modeling.forward.decoder import Decoder
from tests.support.clusters.planners import linear_planner
from tests.support.clusters.spawners import orchestrator_worker, tiny_worker
from tests.support.clusters.storms import CLOCK, CONFIG, HEARTBEAT, MAX_TOKENS, NUM_RANKS, NUM_SLOTS, FaultySpawner
from tests.support.engines.generation import eos_decoder
from tests.support.engines.prefixes import file_bytes, prefix_folder
from tests.support.models.reference import check_equal_tokens
from tests.support.models.tiny_tokenizer import EOS_ID, write_letters

_BLOCK_TOKENS = 16
_NUM_BLOCKS = 24
"""That are kept: fewer than all prompts together have, so that some have to go."""


class Reference:
    """What one process would have generated. Implements Judge."""

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
    """Everything up, and everything down again. The orchestrator finds its tokenizer in `folder`. `generate`: further
    fields of the generation groups' configuration. `emulates`: each worker computes on an emulated device of its
    own."""
    torch.set_num_threads(1)
    decoder, faults = eos_decoder(), SeededPlan()
    write_letters(folder)
    config = replace(CONFIG, block_tokens=_BLOCK_TOKENS)
    prefix_bytes = _NUM_BLOCKS * file_bytes(decoder.layout, _BLOCK_TOKENS)

    def orchestrator(layout: str) -> OrchestratorPlan:
        model = ModelInfo("letters", MAX_TOKENS, decoder.config.vocab_size, "float32", False, layout)
        return OrchestratorPlan(
            orchestrator_worker(folder, config), model, (EOS_ID,), lambda former: linear_planner(), HOST
        )

    with prefix_folder() as prefixes:
        plan = ChaosPlan(
            spawner=FaultySpawner(decoder, faults, prefixes, prefix_bytes, generate, emulates=emulates),
            chain=[tiny_worker("prefill", rank) for rank in range(NUM_RANKS)],
            engines=[tiny_worker("generate", group=group) for group in range(num_groups)],
            orchestrator=orchestrator,
            faults=faults,
            heartbeat=HEARTBEAT,
            num_slots=NUM_SLOTS,
            max_tokens=MAX_TOKENS,
        )
        async with ChaosCluster(plan, CLOCK, lambda line: None) as cluster:
            yield cluster, Reference(decoder)
