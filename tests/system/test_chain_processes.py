"""A prefill group of three processes over gloo. Its results equal those of one process, and it survives ranks that die
or hang during a job."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch.distributed import TCPStore

from baton.types import Epoch, JobId, Rank, RequestId, TokenRange
from tests.support.engines.chain_worker import NUM_LAYERS, Worker
from tests.support.engines.chains import largest_error, random_chunks, random_tokens, reference, until
from tests.support.links.link_groups import HOST
from tests.support.models.tiny_models import random_decoder

pytestmark = pytest.mark.integration

NUM_RANKS = 3
NUM_TOKENS = 40
EDGES = pytest.mark.parametrize("edges", ["", pytest.param("gloo", marks=pytest.mark.ci)])
"""Whether KV goes between devices, by communicators of two ranks."""


class Group:
    """Three worker processes and the store at which they meet."""

    def __init__(self, watchdog_floor_s: float, edges: str) -> None:
        self._place = ("tensors" if edges else "cpu", edges)
        self.decoder = random_decoder(num_layers=NUM_LAYERS)
        self.store = TCPStore(HOST, 0, None, True, wait_for_workers=False)
        self.floor_s = watchdog_floor_s
        self.epoch = 0
        self.number = 0
        self.rng = random.Random(7)
        self.workers = [Worker(watchdog_floor_s, *self._place) for _ in range(NUM_RANKS)]
        for worker in self.workers:
            worker.wait_ready()

    def start_epoch(self) -> None:
        self.epoch += 1
        for rank, worker in enumerate(self.workers):
            worker.start_epoch(self.epoch, rank, NUM_RANKS, self.store.port)
        for worker in self.workers:
            worker.wait_epoch(self.epoch)

    def replace(self, rank: int) -> None:
        self.workers[rank].kill()
        self.workers[rank].close()
        self.workers[rank] = Worker(self.floor_s, *self._place)
        self.workers[rank].wait_ready()

    def submit(self, hold: dict[int, int] | None = None) -> tuple[int, list[int]]:
        """A random job on all ranks; `hold`: rank -> layer at which it stands still. Returns its number and prompt."""
        self.number += 1
        ids = random_tokens(self.rng, NUM_TOKENS, self.decoder)
        job = {
            "number": JobId(self.number),
            "epoch": Epoch(self.epoch),
            "request_id": RequestId("r"),
            "attempt": 1,
            "ranks": tuple(Rank(rank) for rank in range(NUM_RANKS)),
            "chunks": tuple(random_chunks(self.rng, TokenRange(0, NUM_TOKENS), NUM_RANKS)),
            "prompt_ids": ids,
        }
        for rank, worker in enumerate(self.workers):
            worker.submit(job, (hold or {}).get(rank))
        for rank in hold or {}:
            self.workers[rank].wait_holding(self.number)
        return self.number, ids

    def assert_serves(self) -> None:
        """A job over all ranks equals one process."""
        number, ids = self.submit()
        outcomes = [worker.outcome(number) for worker in self.workers]
        assert [outcome.error for outcome in outcomes] == [""] * NUM_RANKS
        expected, logits_V = reference(self.decoder, ids)
        kv = torch.full_like(expected, torch.nan)
        for outcome in outcomes:
            for layer, start, end, rows in outcome.pieces:
                kv[layer, start:end] = torch.frombuffer(bytearray(rows), dtype=torch.float32).view(
                    end - start, 2, 2, -1
                )
        assert largest_error(kv, expected) <= 1e-5
        tokens = [outcome.first_token for outcome in outcomes]
        assert tokens == [None, None, int(logits_V.argmax())]

    def close(self) -> None:
        for worker in self.workers:
            worker.close()


@contextmanager
def running_group(watchdog_floor_s: float, edges: str) -> Iterator[Group]:
    group = Group(watchdog_floor_s, edges)
    try:
        group.start_epoch()
        yield group
    finally:
        group.close()


@EDGES
def test_killed_rank_fails_the_job_at_once_and_the_next_epoch_serves(edges: str) -> None:
    with running_group(60.0, edges) as group:
        for _ in range(3):
            group.assert_serves()
        number, _ = group.submit(hold={0: 2})  # two of the layers have been computed and passed on
        group.workers[1].kill()
        survivors = [group.workers[0], group.workers[2]]
        for worker in survivors:
            until(lambda worker=worker: bool(worker.epoch_error()))  # type: ignore[misc]
        group.workers[0].release()
        errors = [worker.outcome(number).error for worker in survivors]
        assert errors == ["LinkBrokenError"] * 2  # the watchdog, which takes a minute, would say LinkStalledError
        group.replace(1)
        group.start_epoch()
        group.assert_serves()
        group.close()
        assert [worker.exit_code for worker in group.workers] == [0] * NUM_RANKS


@EDGES
def test_stopped_rank_fails_the_job_within_the_watchdog_s_bound(edges: str) -> None:
    with running_group(6.0, edges) as group:
        group.assert_serves()
        number, _ = group.submit(hold={0: 2})
        group.workers[1].stop()
        group.workers[0].release()
        errors = {group.workers[rank].outcome(number).error for rank in (0, 2)}
        assert "LinkStalledError" in errors  # whoever sees it first closes its links, which the other may see first
        assert errors <= {"LinkStalledError", "LinkBrokenError"}
        group.replace(1)
        group.start_epoch()
        group.assert_serves()
