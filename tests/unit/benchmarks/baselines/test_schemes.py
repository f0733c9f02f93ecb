"""Every way to prefill on several ranks gives what one rank gives, over slow and disturbed links too."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from baton.modeling.forward.decoder import Decoder
from baton.types import Epoch, Rank
from benchmarks.baselines.paced import PacedGroup, Pacer
from benchmarks.baselines.pacing import FULL_SPEED, Pace
from benchmarks.baselines.schemes import SCHEMES
from prefill_workers.communicators import Rendezvous
from prefill_workers.torch_links import make_group
from tests.support.engines.generation import prefilled, prompt
from tests.support.links.link_groups import HOST
from tests.support.models.tiny_models import random_decoder

pytestmark = pytest.mark.integration


def group_of(rank: int, num_ranks: int, port: int) -> Any:
    return make_group(Rendezvous(Epoch(1), Rank(rank), num_ranks, f"{HOST}:{port}", HOST, 30.0))


def run(name: str, decoder: Decoder, token_ids: Sequence[int], num_ranks: int, pace: Pace = FULL_SPEED) -> torch.Tensor:
    """The logits, which exactly one rank has."""
    store = dist.TCPStore(HOST, 0, None, True, wait_for_workers=False)

    def work(rank: int) -> torch.Tensor | None:
        pacer = Pacer(rank)
        pacer.set(pace)
        group = PacedGroup(group_of(rank, num_ranks, store.port), pacer, timedelta(seconds=30))
        logits = SCHEMES[name](decoder, token_ids, group)
        pacer.close()
        return logits

    with ThreadPoolExecutor(num_ranks) as pool:
        results = [logits for logits in pool.map(work, range(num_ranks)) if logits is not None]
    (logits,) = results
    return logits


@pytest.mark.parametrize(("num_ranks", "num_tokens"), [(2, 16), (2, 37), (3, 40), (3, 7)])
@pytest.mark.parametrize("name", SCHEMES)
def test_a_scheme_equals_one_process(name: str, num_ranks: int, num_tokens: int) -> None:
    decoder = random_decoder(num_layers=3)
    _, expected_TV = prefilled(decoder, prompt(num_tokens))
    logits = run(name, decoder, prompt(num_tokens), num_ranks)
    torch.testing.assert_close(logits, expected_TV[-1:], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("name", SCHEMES)
def test_a_scheme_equals_one_process_over_slow_links(name: str, num_ranks: int) -> None:
    decoder = random_decoder(num_layers=2)
    _, expected_TV = prefilled(decoder, prompt(24))
    pace = Pace(bandwidth=2e6, busy_share=0.3, burst_s=0.001, seed=1)
    logits = run(name, decoder, prompt(24), num_ranks, pace)
    torch.testing.assert_close(logits, expected_TV[-1:], atol=1e-4, rtol=1e-4)
