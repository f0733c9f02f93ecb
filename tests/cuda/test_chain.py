"""Chains of ranks that compute on one device: the KV and the first token of one process on the CPU."""

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest
import torch
from torch.distributed import TCPStore, is_nccl_available

from baton.modeling.device.port import Device
from baton.modeling.forward.decoder import Decoder
from baton.types import Epoch, JobId, Rank, RequestId, TokenRange
from tests.cuda.conftest import ON_GPU
from tests.support.engines.chain_worker import NUM_LAYERS, Worker
from tests.support.engines.chains import (
    ChainGroup,
    assert_right,
    largest_error,
    random_chunks,
    random_tokens,
    reference,
    run_chain,
    until,
)
from tests.support.links.link_groups import (
    HOST,
    MakeConnect,
    communicator_connects,
    in_process_connects,
    torch_connects,
)
from tests.support.models.tiny_models import random_decoder

pytestmark = pytest.mark.integration

Make = Callable[..., Decoder]
NUM_TOKENS = 60
TOLERANCE = 2e-5


@pytest.mark.parametrize("connects", [in_process_connects, torch_connects])
@pytest.mark.parametrize("prefix_tokens", [0, 16])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_kv_and_first_token_are_those_of_the_cpu(
    make: Make, num_ranks: int, prefix_tokens: int, connects: MakeConnect
) -> None:
    cpu, there = random_decoder(num_layers=3), make(num_layers=3)
    with ChainGroup(there, num_ranks, connects=connects) as group:
        for seed in range(3):
            run = run_chain(group, seed, prefix_tokens=prefix_tokens, num_tokens=NUM_TOKENS)
            assert_right(group, run, cpu, most_error=TOLERANCE)


@pytest.mark.skipif(ON_GPU, reason="edges of gloo are for what stands for a GPU")
@pytest.mark.parametrize("prefix_tokens", [0, 16])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_kv_that_stays_on_devices_is_that_of_the_cpu(make: Make, num_ranks: int, prefix_tokens: int) -> None:
    test_kv_and_first_token_are_those_of_the_cpu(make, num_ranks, prefix_tokens, communicator_connects)


@contextmanager
def two_processes(device: str, edges: str = "", gpus: tuple[int, int] = (0, 0)) -> Iterator[list[Worker]]:
    """Two ranks, each a process with a context of its own on a device, linked by gloo or by edges."""
    store = TCPStore(HOST, 0, None, True, wait_for_workers=False)
    with ExitStack() as stack:
        workers = [Worker(60.0, device, edges, gpu) for gpu in gpus]
        for worker in workers:
            stack.callback(worker.close)
        for worker in workers:
            worker.wait_ready()
        for rank, worker in enumerate(workers):
            worker.start_epoch(1, rank, 2, store.port)
        for worker in workers:
            worker.wait_epoch(1)
        yield workers


@pytest.mark.ci
def test_two_processes_on_one_device_are_one_on_the_cpu(device: Device, request: pytest.FixtureRequest) -> None:
    with two_processes(request.node.callspec.params["device"]) as workers:
        assert_serve(workers)


@pytest.mark.ci
@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.skipif(not is_nccl_available(), reason="needs a torch with NCCL")
def test_two_processes_on_two_gpus_with_an_edge_of_nccl_are_one_on_the_cpu(
    device: Device, request: pytest.FixtureRequest
) -> None:
    with two_processes(request.node.callspec.params["device"], "nccl", (0, 1)) as workers:
        assert_serve(workers)
        workers[1].kill()
        until(lambda: bool(workers[0].epoch_error()))
        assert "broke" in workers[0].epoch_error()


def assert_serve(workers: list[Worker]) -> None:
    """Jobs over both ranks bring the KV and token of one process on the CPU."""
    cpu, rng = random_decoder(num_layers=NUM_LAYERS), random.Random(5)
    for number in range(1, 4):
        ids = random_tokens(rng, NUM_TOKENS, cpu)
        job = {
            "number": JobId(number),
            "epoch": Epoch(1),
            "request_id": RequestId("r"),
            "attempt": 1,
            "ranks": (Rank(0), Rank(1)),
            "chunks": tuple(random_chunks(rng, TokenRange(0, NUM_TOKENS), 2)),
            "prompt_ids": ids,
        }
        for worker in workers:
            worker.submit(job)
        outcomes = [worker.outcome(number) for worker in workers]
        assert [outcome.error for outcome in outcomes] == ["", ""]
        expected, logits_V = reference(cpu, ids)
        kv = torch.full_like(expected, torch.nan)
        for outcome in outcomes:
            for layer, start, end, rows in outcome.pieces:
                kv[layer, start:end] = torch.frombuffer(bytearray(rows), dtype=torch.float32).view(
                    kv[layer, start:end].shape
                )
        assert largest_error(kv, expected) <= TOLERANCE
        assert [outcome.first_token for outcome in outcomes] == [None, int(logits_V.argmax())]
