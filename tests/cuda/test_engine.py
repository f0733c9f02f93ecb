"""A generation engine on a device: tokens are those of the CPU, whatever the residency, in any batch."""

import dataclasses
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from baton.modeling.forward.decoder import Decoder
from baton.sampling_params import SamplingParams
from baton.types import SampledToken, TokenRange
from generate_workers.config import SpeculationName
from generate_workers.slots.kv_memory import MemoryLimits
from tests.support.engines.generation import eos_decoder, harness, prefilled, prompt, reference_ids
from tests.support.engines.slot_tables import push_buffer
from tests.support.models.tiny_tokenizer import EOS_ID

GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=12, temperature=0.9, top_p=0.95, seed=77, ignore_eos=True)
PENALISED = dataclasses.replace(
    SAMPLED,
    repetition_penalty=1.3,
    frequency_penalty=0.5,
    presence_penalty=0.2,
    logit_bias={3: -2.0},
    min_tokens=3,
    logprobs=2,
)
LENGTHS = (1, 2, 17, 40, 5, 63)
MAX_TOKENS = 128
CPU = eos_decoder()
policies = pytest.mark.parametrize("policy", ["device", "host"])


@pytest.fixture
def decoder(make: Callable[..., Decoder]) -> Decoder:
    """The model of CPU, on the device."""
    there = make()
    there.config = dataclasses.replace(there.config, eos_token_ids=(EOS_ID,))
    return there


@policies
@pytest.mark.parametrize("params", [GREEDY, SAMPLED, PENALISED], ids=["greedy", "sampled", "penalised"])
def test_ragged_rows_of_one_batch_are_those_of_the_cpu(decoder: Decoder, policy: str, params: SamplingParams) -> None:
    with harness(decoder=decoder, policy=policy, num_slots=len(LENGTHS)) as made:
        streams = [made.submit(prompt(length), params)[1] for length in LENGTHS]
        made.run()
        for length, stream in zip(LENGTHS, streams, strict=True):
            assert stream.token_ids == reference_ids(CPU, prompt(length), params)


@policies
@pytest.mark.parametrize("way", ["streaming", "ngram"])
def test_drafts_that_are_verified_change_no_token(decoder: Decoder, policy: str, way: SpeculationName) -> None:
    long = dataclasses.replace(SAMPLED, max_tokens=30)
    with harness(decoder=decoder, policy=policy, speculation=way) as made:
        streams = [made.submit(prompt(length), long)[1] for length in LENGTHS[2:]]
        made.run()
        for length, stream in zip(LENGTHS[2:], streams, strict=True):
            assert stream.token_ids == reference_ids(CPU, prompt(length), long)


@policies
def test_choices_share_a_prompt(decoder: Decoder, policy: str) -> None:
    params = dataclasses.replace(SAMPLED, n=3, temperature=1.5)
    with harness(decoder=decoder, policy=policy) as made:
        answer = made.answer(prompt(30), params)
        for number in range(3):
            expected = reference_ids(CPU, prompt(30), params.of_choice(number))
            assert answer.choice(number).token_ids == expected


@policies
def test_rows_wait_where_the_device_has_room_for_two(decoder: Decoder, policy: str) -> None:
    probe = decoder.device.row_memory(decoder.layout, MAX_TOKENS)
    limits = MemoryLimits(1 << 40, 2 * probe.bytes_for(MAX_TOKENS))
    prompts = [prompt(60 + seed, seed=seed) for seed in range(6)]
    long = dataclasses.replace(GREEDY, max_tokens=50)
    with harness(decoder=decoder, policy=policy, limits=limits, max_slot_tokens=MAX_TOKENS) as made:
        streams = [made.submit(ids, long)[1] for ids in prompts]
        made.run()
        assert limits.device_bytes is not None
        for ids, stream in zip(prompts, streams, strict=True):
            assert stream.token_ids == reference_ids(CPU, ids, long)


@policies
def test_pushed_kv_is_used_where_it_was_pushed(decoder: Decoder, policy: str) -> None:
    with harness(decoder=decoder, policy=policy) as made:
        lease = made.reserve(33, 64)
        made.push_and_commit(lease.ref, prompt(33), SAMPLED)
        _, stream = made.submit(prompt(33), SAMPLED, ref=lease.ref)
        made.run(stream)
        assert stream.token_ids == reference_ids(CPU, prompt(33), SAMPLED)


@policies
def test_pushes_of_other_threads_disturb_no_row(decoder: Decoder, policy: str) -> None:
    """KV made on the CPU is pushed by two threads while rows decode."""
    long = dataclasses.replace(GREEDY, max_tokens=40)
    with harness(decoder=decoder, policy=policy) as made, ThreadPoolExecutor(2) as pool:
        _, steady = made.submit(prompt(11), long)
        leases = {length: made.reserve(length, 64) for length in (33, 21)}
        pushes = []
        for length, lease in leases.items():
            buffer, _ = prefilled(CPU, prompt(length))
            pushes.append(pool.submit(push_buffer, made.slots, lease.ref, buffer, TokenRange(0, length)))
        while not all(push.done() for push in pushes):
            made.engine.step()
        for push in pushes:
            push.result()
        streams = {}
        for length, lease in leases.items():
            ids = reference_ids(CPU, prompt(length), GREEDY)
            made.commit(lease.ref, SampledToken(ids[0]))
            streams[length] = made.submit(prompt(length), GREEDY, ref=lease.ref)[1]
        made.run()
        assert steady.token_ids == reference_ids(CPU, prompt(11), long)
        for length, stream in streams.items():
            assert stream.token_ids == reference_ids(CPU, prompt(length), GREEDY)
