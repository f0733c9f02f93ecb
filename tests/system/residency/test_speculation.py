"""Speculation through the whole server, in fp32. Texts equal those of one process, whatever changes in the batch."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from baton.sampling_params import SamplingParams
from orchestrator.requests.config import OrchestratorConfig
from tests.support.clusters.clients import Answer
from tests.support.clusters.cluster import BareCluster, cluster
from tests.support.engines.generation import eos_decoder, prompt
from tests.support.engines.prefixes import prefix_folder
from tests.support.engines.slot_tables import page_bytes
from tests.support.engines.speculating import SPECULATING, ways
from tests.support.models.reference import check_equal_tokens

pytestmark = pytest.mark.integration

BLOCK = 16
CONFIG = OrchestratorConfig(block_tokens=BLOCK, disaggregation="always")
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)
Asked = list[tuple[tuple[int, ...], SamplingParams]]


@pytest.fixture
def folder() -> Iterator[Path]:
    with prefix_folder() as made:
        yield made


def ragged(num_rows: int) -> Asked:
    """Greedy requests of uneven lengths, on both sides of the ends of blocks, that end at different times; every third
    quotes itself."""
    asked = []
    for number in range(num_rows):
        ids = prompt(BLOCK - 2 + 5 * number % 70, seed=number)
        params = replace(GREEDY, max_tokens=40 - 7 * number % 40)
        asked.append((ids * 3 if number % 3 == 0 else ids, params))
    return asked


async def answers(made: BareCluster, asked: Asked) -> list[Answer]:
    """All at once, and each as one process answers it."""
    found = await asyncio.gather(*(made.ask(made.request(ids, params)) for ids, params in asked))
    for (ids, params), answer in zip(asked, found, strict=True):
        assert len(answer.token_ids) == params.max_tokens
        check_equal_tokens(made.decoder, ids, answer.token_ids, params)
    return found


def num_drafted(made: BareCluster) -> int:
    """By all groups."""
    found = [group.engine.status().speculation for group in made.groups]
    return sum(stats.num_drafted for stats in found if stats is not None)


@pytest.mark.parametrize("way", ways("ngram", "streaming", ci=("auto", "auto host", "streaming host")))
@pytest.mark.parametrize("num_rows", [pytest.param(1, marks=pytest.mark.ci), 7, pytest.param(32, marks=pytest.mark.ci)])
async def test_a_ragged_batch_has_the_tokens_of_one_process(num_rows: int, way: str) -> None:
    async with cluster(num_slots=32, config=CONFIG, generate=SPECULATING[way]) as made:
        await answers(made, ragged(num_rows))
        assert num_drafted(made) or way in ("auto", "auto host")


@pytest.mark.parametrize("way", ways("streaming host", ci=("auto", "ngram", "streaming")))
async def test_rows_that_begin_with_a_cached_prefix_have_the_same_tokens(folder: Path, way: str) -> None:
    """Of each prompt, and then of the chat's next turn: the answer's KV is final although drafts lay there before."""
    folders = {"prefill": folder, "generate": folder}
    async with cluster(config=CONFIG, folders=folders, generate=SPECULATING[way]) as made:
        asked = ragged(6)
        first = await answers(made, asked)
        await made.until_empty()  # answers are kept
        known = [(*ids, *answer.token_ids) for (ids, _), answer in zip(asked, first, strict=True)]
        second = await answers(made, [((*ids, *prompt(9)), GREEDY) for ids in known])
        hits = [answer.finished.usage.num_cached_tokens for answer in second if answer.finished is not None]
        assert hits == [(len(ids) - 1) // BLOCK * BLOCK for ids in known]
        assert num_drafted(made) or way == "auto"


@pytest.mark.parametrize("way", ways("ngram", ci=("auto", "streaming", "auto host", "streaming host")))
async def test_rows_that_are_preempted_go_on_with_the_same_tokens(way: str) -> None:
    """There is memory for three of eight rows."""
    params = replace(GREEDY, max_tokens=60)
    most = page_bytes(48 + params.max_tokens, eos_decoder().layout)
    scarce = {**SPECULATING[way], "growth_tokens": 1, "kv_memory_bytes": 3 * most}
    async with cluster(num_slots=8, generate=scarce) as made:
        await answers(made, [(prompt(40 + number, seed=number), params) for number in range(8)])
        (group,) = made.groups
        assert group.engine.status().num_preemptions
        assert num_drafted(made) or way in ("auto", "auto host")


@pytest.mark.parametrize("way", ways("streaming", ci=("ngram", "auto host", "streaming host")))
async def test_streams_go_on_in_another_group_when_theirs_ends_in_mid_round(way: str) -> None:
    """The engine stands within a forward of a round, a draft's or the one that verifies."""
    params = SamplingParams(max_tokens=60, temperature=0.8, presence_penalty=0.5, seed=3, ignore_eos=True)
    ids = prompt(20) * 2
    async with cluster(num_groups=2, generate=SPECULATING[way]) as made:
        for gate in made.group_gates:
            gate.shut(num_passes=17)
        call, answer = made.open(made.request(ids, params)), Answer()
        await answer.read(call, 3)
        lost = await made.busy_group()
        await made.group_gates[lost].until_reached()
        await made.lose_group(lost)
        await answer.drain(call)
        assert answer.indices == list(range(params.max_tokens))
        check_equal_tokens(made.decoder, ids, answer.token_ids, params)
        assert answer.finished is not None
        assert answer.finished.usage.num_attempts == 2
        made.groups.pop(lost)
