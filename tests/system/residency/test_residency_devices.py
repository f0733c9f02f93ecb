"""Generation groups with every residency and speculation on a device with its own memory, over gRPC. Tokens equal the
CPU's, and memory never exceeds its configured limit."""

import asyncio
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from baton.modeling.device.copying import LinkRate
from baton.modeling.device.emulated import EmulatedDevice
from baton.modeling.forward.decoder import Decoder
from baton.modeling.forward.selection import Selection
from baton.modeling.forward.weight_sizes import weight_bytes
from baton.modeling.kv.buffers import KvBuffer
from baton.modeling.sparse.selection_file import save_prepared
from baton.sampling_params import SamplingParams
from baton.types import SampledToken
from generate_workers.config import EngineConfig
from generate_workers.engine.memory_limits import make_memory
from tests.support.engines.devices import on_emulated
from tests.support.engines.generation import prefilled, prompt
from tests.support.engines.generation_servers import Client, ids_in, read, serving
from tests.support.engines.infinigen import prepared
from tests.support.engines.speculating import SPECULATING
from tests.support.models.tiny_models import random_decoder

pytestmark = pytest.mark.integration

DECODER = random_decoder(num_layers=5)
FEW = Selection(3.0, 0.1, 2, 3, free_keys=6)
PARAMS = SamplingParams(max_tokens=24, temperature=0.8, ignore_eos=True)
PUSHED = [prompt(length, seed) for seed, length in enumerate((60, 25, 90))]
LOCAL = [prompt(length, seed) for seed, length in enumerate((1, 40, 70))]
CHOOSING = {"draft_tokens": 3, "draft_keys": 16}
RESIDENCIES: dict[str, dict[str, Any]] = {
    **{name: {"residency": name} for name in ("host", "infinigen", "int4")},
    "pool": {"residency": "infinigen", "pool_tokens": 32},
}
SPECULATIONS: dict[str, dict[str, Any]] = {
    **{name: dict(fields) for name, fields in SPECULATING.items() if name != "off"},
    "drafts infinigen": {"speculation": "infinigen", **CHOOSING},
}
QUICK = ("infinigen", "streaming host")
"""Those of every run; the others run in CI."""


def marked(ways: dict[str, dict[str, Any]]) -> list[Any]:
    """The ways, those that are slow marked so."""
    return [pytest.param(way, id=name, marks=[] if name in QUICK else pytest.mark.ci) for name, way in ways.items()]


def configured(way: dict[str, Any], folder: Path, **more: Any) -> EngineConfig:
    """A group's configuration, with the file of a prepared selection."""
    path = folder / "found.safetensors"
    save_prepared(prepared(FEW, 1, decoder=DECODER), path)
    fields = {"speculation": "off", "growth_tokens": 8, **way, "selection_file": str(path), **more}
    return EngineConfig(4, 128, **fields)


async def pushed_at_once(client: Client, kv: Sequence[KvBuffer]) -> list[list[int]]:
    """All contexts pushed before any of them runs on; the outputs."""
    params = [dataclasses.replace(PARAMS, seed=seed) for seed in range(len(kv))]
    capacities = [len(ids) + PARAMS.max_tokens for ids in PUSHED]
    leases = [await client.reserve(len(ids), most) for ids, most in zip(PUSHED, capacities, strict=True)]
    calls = [client.open(ids, each, lease.ref) for ids, each, lease in zip(PUSHED, params, leases, strict=True)]
    for lease, buffer in zip(leases, kv, strict=True):
        await client.push_kv(lease, buffer)
    reads = [asyncio.create_task(read(call)) for call in calls]
    for lease in leases:
        await client.kv.commit(lease.ref, [SampledToken(5)])
    return [ids_in(await each) for each in reads]


async def answers(config: EngineConfig, decoder: Decoder) -> list[list[int]]:
    """Prompts that were pushed, then prompts that are prefilled here, one after the other."""
    kv = [prefilled(DECODER, ids)[0] for ids in PUSHED]
    async with serving(config, decoder) as client:
        found = await pushed_at_once(client, kv)
        for ids in LOCAL:
            found.append(ids_in(await read(client.open(ids, dataclasses.replace(PARAMS, seed=len(ids))))))
        await client.until_empty()
    return found


@pytest.mark.parametrize("way", marked({**RESIDENCIES, **SPECULATIONS}))
async def test_tokens_are_those_of_the_cpu(way: dict[str, Any], tmp_path: Path) -> None:
    config = configured(way, tmp_path)
    device = EmulatedDevice(LinkRate(bytes_per_s=1e9))
    expected = await answers(config, DECODER)
    assert await answers(config, on_emulated(DECODER, device)) == expected
    assert device.memory_use.peak_bytes > 0


@pytest.mark.parametrize("way", marked(RESIDENCIES))
async def test_rows_give_way_where_the_device_is_full(way: dict[str, Any], tmp_path: Path) -> None:
    """It has room for two rows as long as they get; four prompts that are prefilled here come at once."""
    roomy = make_memory(on_emulated(DECODER), configured(way, tmp_path))
    left = roomy.residency.scratch_bytes + 2 * roomy.residency.bytes_for(100).device
    config = configured(way, tmp_path, device_memory_bytes=weight_bytes(DECODER.weights) + left)
    device = EmulatedDevice()
    async with serving(config, on_emulated(DECODER, device)) as client:
        params = dataclasses.replace(PARAMS, max_tokens=80)
        calls = [client.open(prompt(20, seed), dataclasses.replace(params, seed=seed)) for seed in range(4)]
        found = [ids_in(await each) for each in [asyncio.create_task(read(call)) for call in calls]]
        assert [len(ids) for ids in found] == [params.max_tokens] * 4
        await client.until_empty()
        assert client.server.engine.status().num_preemptions > 0
    assert 0 < device.memory_use.peak_bytes <= left
