"""Requests that come, grow, stop, are cancelled, pushed and preempted: memory is counted truly, and all comes back."""

import random

import pytest

from generate_workers.slots.kv_memory import KvMemory, MemoryLimits
from tests.support.clusters.churn import MAX_OUTPUT, MAX_PROMPT, Churn
from tests.support.engines.generation import Harness, eos_decoder, harness
from tests.support.engines.slot_tables import is_empty, memories_of, page_bytes
from tests.support.kernels.os_memory import process_bytes, resident_bytes

NUM_SLOTS = 8
DECODER = eos_decoder()
LIMIT = 5 * page_bytes(160, DECODER.layout)
"""Enough for the longest request, too little for a full batch of common ones."""


def churn(made: Harness, memory: KvMemory, num_requests: int, seed: int) -> Churn:
    run = Churn(made, memories_of(memory), random.Random(seed), num_requests, num_open=12)
    run.run()
    return run


SOAK = [pytest.mark.nightly, pytest.mark.timeout(3600)]


@pytest.mark.parametrize(
    ("policy", "num_requests"),
    [
        ("device", 60),
        ("host", 60),
        pytest.param("device", 10_000, marks=SOAK),
        pytest.param("host", 2_000, marks=SOAK),
    ],
)
def test_memory_comes_back_and_is_what_the_operating_system_says(policy: str, num_requests: int) -> None:
    with harness(
        decoder=DECODER,
        policy=policy,
        num_slots=NUM_SLOTS,
        max_slot_tokens=MAX_PROMPT + MAX_OUTPUT,
        max_batched_tokens=64,
        max_waiting=24,
        limits=MemoryLimits(LIMIT),
        growth_tokens=16,
        poison=False,
    ) as made:
        memory = made.slots.memory
        churn(made, memory, num_requests // 3, seed=0)  # what torch and python keep for themselves, they have by now
        before = process_bytes()
        run = churn(made, memory, num_requests, seed=1)
        assert run.num_preemptions > 0
        assert run.num_cancelled > 0
        assert run.num_pushed > 0
        assert 0.5 * LIMIT < run.most_promised <= LIMIT
        assert run.worst_error == 0
        assert is_empty(made.slots.ledger())
        assert not any(map(resident_bytes, memories_of(memory)))
        assert num_requests < 1000 or process_bytes() <= 1.02 * before
