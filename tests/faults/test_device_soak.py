"""Generation on an emulated device with too little memory for its load: sequences are pushed, wait, are preempted and
resumed, and streams are cancelled. The device never holds more than its limit, and all tokens equal those of a CPU
without a limit."""

import asyncio
import dataclasses
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from baton.errors import ResourceExhaustedError
from baton.modeling.checkpoints.weights import load_decoder
from baton.modeling.device.emulated import EmulatedDevice
from baton.modeling.forward.decoder import Decoder
from baton.modeling.forward.weight_sizes import weight_bytes
from baton.modeling.kv.buffers import BufferSpan, KvBuffer
from baton.sampling_params import SamplingParams
from baton.text.tokenizer import Tokenizer
from baton.types import SampledToken, TokenRange
from generate_workers.config import EngineConfig
from orchestrator.requests.config import OrchestratorConfig
from tests.support.clusters.cluster import MAX_TOKENS, BareCluster, cluster
from tests.support.engines.generation import eos_decoder, prompt, reference_ids
from tests.support.engines.generation_servers import Client, ids_in, read, serving
from tests.support.engines.prefixes import file_bytes, prefix_folder
from tests.support.models.texts import passage_ids
from tests.support.models.tiny_models import random_decoder

pytestmark = pytest.mark.integration

FIRST = SampledToken(5)
BLOCK = 16


@dataclasses.dataclass(frozen=True)
class Load:
    """What is asked in a round, and how often."""

    text: Sequence[int]
    """Token ids that every prompt is a beginning of."""
    num_asks: int
    least_tokens: int
    most_tokens: int
    num_outputs: int
    num_rounds: int
    num_slots: int

    def asks(self) -> list[tuple[tuple[int, ...], SamplingParams]]:
        """The prompts and parameters of a round, always the same."""
        rng = random.Random(1)
        lengths = [rng.randint(self.least_tokens, self.most_tokens) for _ in range(self.num_asks)]
        params = SamplingParams(max_tokens=self.num_outputs, ignore_eos=True)
        return [(tuple(self.text[:length]), params) for length in lengths]

    @property
    def config(self) -> EngineConfig:
        most = self.most_tokens + self.num_outputs + 1
        return EngineConfig(self.num_slots, most, max_waiting=2 * self.num_asks, growth_tokens=8)


@torch.inference_mode()
def beginnings(decoder: Decoder, load: Load) -> KvBuffer:
    """The KV of the longest prompt, of which all others are beginnings."""
    whole = TokenRange(0, load.most_tokens)
    buffer = KvBuffer(decoder.layout, whole)
    for tokens in whole.split(512):
        decoder.forward(load.text[tokens.start : tokens.end], [BufferSpan(buffer, tokens)])
    return buffer


async def answer(client: Client, kv: KvBuffer, ids: tuple[int, ...], params: SamplingParams) -> list[int]:
    """The tokens after the first: over KV that is pushed where there is room, else prefilled there in its turn."""
    try:
        lease = await client.reserve(len(ids), len(ids) + params.max_tokens, ttl_s=900.0)
    except ResourceExhaustedError:
        return ids_in(await read(client.open(ids, params, output_ids=(FIRST.token_id,))))[1 - params.max_tokens :]
    tokens = TokenRange(0, len(ids))
    part = KvBuffer(kv.layout, tokens)
    part.copy_from(kv, tokens)
    call = client.open(ids, params, lease.ref)
    await client.push_kv(lease, part)
    await client.kv.commit(lease.ref, [FIRST])
    return ids_in(await read(call))[1 - params.max_tokens :]


async def check_load(decoder: Decoder, load: Load, limit_bytes: int, tokenizer: Tokenizer | None = None) -> None:
    """`limit_bytes`: of the device, for weights and KV."""
    kv, asks = await asyncio.to_thread(beginnings, decoder, load), load.asks()
    async with serving(load.config, decoder, tokenizer) as client:
        expected = await asyncio.gather(*(answer(client, kv, *each) for each in asks))
    assert {len(ids) for ids in expected} == {load.num_outputs - 1}
    device = EmulatedDevice()
    config = dataclasses.replace(load.config, device_memory_bytes=limit_bytes)
    async with serving(config, Decoder(decoder.config, decoder.weights, device=device), tokenizer) as client:
        for number in range(load.num_rounds):
            leaving = [client.open(*each) for each in asks[number :: len(asks) // 3]]
            found = asyncio.gather(*(answer(client, kv, *each) for each in asks))
            for call in leaving:
                await call.read()
                call.cancel()
            assert await found == expected, f"round {number}"
            await client.until_empty()
            assert not client.server.slots.ledger().imbalance
            assert device.memory_use.num_bytes == 0
        assert client.server.engine.status().num_preemptions > 0
    room = limit_bytes - weight_bytes(decoder.weights)
    assert device.memory_use.limit_bytes == room
    assert 0.8 * room < device.memory_use.peak_bytes <= room


@pytest.mark.ci
async def test_a_small_device_serves_what_does_not_fit_at_once() -> None:
    decoder = random_decoder(num_layers=6)
    row = EmulatedDevice().row_memory(decoder.layout, 256)
    limit_bytes = weight_bytes(decoder.weights) + 4 * row.bytes_for(200)
    await check_load(decoder, Load(prompt(200), 24, 30, 150, 50, 3, 8), limit_bytes)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
async def test_a_device_of_1_gib_serves_what_does_not_fit_at_once(smollm2: Path) -> None:
    decoder, tokenizer = load_decoder(smollm2, dtype="float32"), Tokenizer.load(smollm2)
    load = Load(passage_ids(smollm2, 1000), 32, 300, 800, 64, 2, 24)
    await check_load(decoder, load, 1 << 30, tokenizer)


async def ask(made: BareCluster, ids: tuple[int, ...], params: SamplingParams) -> None:
    found = await made.ask(made.request(ids, params))
    assert found.token_ids == reference_ids(made.decoder, ids, params)


@pytest.mark.ci
@pytest.mark.parametrize("residency", ["device", "host"])
async def test_a_relay_whose_prefixes_and_rows_do_not_fit_is_exact(residency: str) -> None:
    """Blocks are evicted from the store while rows give way on the device."""
    decoder = eos_decoder()
    row = EmulatedDevice().row_memory(decoder.layout, MAX_TOKENS)
    generate = {
        "residency": residency,
        "device_memory_bytes": weight_bytes(decoder.weights) + 3 * row.bytes_for(MAX_TOKENS) // 2,
        "growth_tokens": 8,
        "speculation": "off",
    }
    rng, params = random.Random(2), SamplingParams(max_tokens=60, ignore_eos=True)
    stems = [prompt(96, seed=stem) for stem in range(4)]
    config = OrchestratorConfig(block_tokens=BLOCK)
    with prefix_folder() as folder:
        made_relay = cluster(
            config=config,
            folders={"prefill": folder, "generate": folder},
            prefix_bytes=12 * file_bytes(decoder.layout, BLOCK),
            generate=generate,
            device="emulated",
        )
        async with made_relay as made:
            for number in range(3):
                prompts = [
                    (*rng.choice(stems)[: rng.randrange(1, 96)], *prompt(rng.randrange(1, 40), number))
                    for _ in range(12)
                ]
                await asyncio.gather(*(ask(made, ids, params) for ids in prompts))
            await made.until_empty(10.0)
            (group,) = made.groups
            use = group.engine._decoder.device.memory_use
            assert use.limit_bytes is not None and 0 < use.peak_bytes <= use.limit_bytes
            assert use.num_bytes == 0
            assert not group.slots.ledger().imbalance
            assert group.engine.status().num_preemptions > 0 or residency == "host"
