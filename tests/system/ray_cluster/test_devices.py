"""Clusters on Ray whose workers compute on devices with their own memory: streams, and the loss of a worker. Tokens
equal those of one process on the CPU.

One GPU is enough. If both pools compute on GPUs, they share it.
"""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from baton import Client, SamplingParams
from baton.modeling.checkpoints.weights import load_decoder
from tests.support.clusters.on_ray.ray_clusters import ServedCluster, endpoints, listener, served, until_settled
from tests.support.engines.generation import prompt
from tests.support.models.reference import check_equal_tokens
from tests.support.models.tiny_tokenizer import ids_of

pytestmark = pytest.mark.cluster

LENGTHS = (1, 17, 40, 120, 300, 301)
GREEDY = SamplingParams(max_tokens=40, ignore_eos=True)
DRAWN = SamplingParams(max_tokens=40, ignore_eos=True, temperature=0.8, seed=7)
LONG = SamplingParams(max_tokens=400, ignore_eos=True)
ARRANGEMENTS = {
    "one pool": ("prefill.num_groups=0", "orchestrator.disaggregation=auto", "generate.device={}"),
    "generation": ("generate.device={}",),
    "both": (
        *("prefill.device={}", "prefill.num_ranks=2", "prefill.gpu_share=0.3"),
        *("generate.device={}", "generate.gpu_share=0.4", "generate.device_memory_bytes=1GiB"),
    ),
}
"""Settings by what computes on the device."""
CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
CASES = [
    *(pytest.param("cuda", each, marks=CUDA) for each in ARRANGEMENTS),
    pytest.param("emulated", "both", marks=pytest.mark.ci),
    *(pytest.param("emulated", each, marks=pytest.mark.nightly) for each in ("one pool", "generation")),
]


def check_answers(running: ServedCluster, client: Client, model: Path) -> None:
    """Streams at once, greedy and drawn, asked twice: the second time their beginnings may be cached."""
    decoder = load_decoder(model, dtype="float32")
    asked = [(prompt(length, length), params) for length in LENGTHS for params in (GREEDY, DRAWN)]
    for _ in range(2):
        with ThreadPoolExecutor(len(asked)) as pool:
            answers = [pool.submit(client.generate(token_ids=ids, params=params).collect) for ids, params in asked]
        for (ids, params), answer in zip(asked, answers, strict=True):
            check_equal_tokens(decoder, ids, [token.token_id for token in answer.result().tokens], params)
    until_settled(running, client)


def check_a_lost_engine(running: ServedCluster, client: Client, model: Path) -> None:
    """A stream whose generation worker is killed goes on in the worker that takes its place, with the same tokens."""
    stream = client.generate(token_ids=ids_of("Once"), params=LONG)
    events = iter(stream)
    token_ids = [next(event.token.token_id for event in events if event.token is not None)]
    os.kill(listener(endpoints(client.cluster_state(), "generate")[0]), signal.SIGKILL)
    token_ids += [event.token.token_id for event in events if event.token is not None]
    assert len(token_ids) == LONG.max_tokens
    check_equal_tokens(load_decoder(model, dtype="float32"), ids_of("Once"), token_ids, LONG)
    until_settled(running, client)


@pytest.mark.parametrize(("device", "arrangement"), CASES)
def test_tokens_are_those_of_one_process(device: str, arrangement: str, letters: Path, tmp_path: Path) -> None:
    settings = [each.format(device) for each in ARRANGEMENTS[arrangement]]
    with served(tmp_path, letters, *settings) as running, Client(running.target) as client:
        check_answers(running, client, letters)
        check_a_lost_engine(running, client, letters)
    assert not running.stdout
