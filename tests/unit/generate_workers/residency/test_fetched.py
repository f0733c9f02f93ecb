"""InfiniGen across a link: the picks, logits and tokens of the CPU's, and no byte over the link that is not counted."""

import random
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from baton.modeling.device.copying import LinkRate, copy_bytes
from baton.modeling.forward.decoder import Decoder
from baton.modeling.forward.selection import Selection
from baton.modeling.forward.weight_sizes import weight_bytes
from baton.modeling.kv.arena import WrongMemoryError
from baton.modeling.sparse.selection_file import save_prepared
from baton.types import SlotId, TokenRange
from generate_workers.config import EngineConfig
from generate_workers.engine.memory_limits import make_memory
from generate_workers.residency.fetched.infinigen import FetchedInfinigenResidency
from generate_workers.residency.fetched.rows import PIECE_TOKENS
from generate_workers.residency.port import KvShape
from generate_workers.residency.row_parts import MakeMemory
from generate_workers.slots.kv_memory import MemoryLimits
from tests.support.engines.devices import PoisonedDevice, on_emulated
from tests.support.engines.generation import prompt
from tests.support.engines.infinigen import ALL, DECODER, LAYOUT, SOME, infinigen, prepared
from tests.support.engines.selective import PROMPTS, TOKENS, Bench, MakePolicy, answers
from tests.support.engines.slot_tables import UNLIMITED
from tests.support.models.tiny_models import random_decoder

FEW = replace(SOME, most_share=0.1, free_keys=6, num_last=3)
"""Chooses so few keys that slots change their keys all the time."""
NUM_LAYERS = LAYOUT.num_layers - 2


def fetched(decoder: Decoder, selection: Selection = FEW, num_areas: int = NUM_LAYERS) -> MakePolicy:
    """The policy with so many areas a row."""

    def make(shape: KvShape, _: MakeMemory) -> FetchedInfinigenResidency:
        found = prepared(selection, decoder=decoder)
        most = FetchedInfinigenResidency(shape, found, decoder)
        area = most._rows[0].hot.bytes_for(shape.max_slot_tokens) // NUM_LAYERS
        each = most.bytes_for(shape.max_slot_tokens).device - (NUM_LAYERS - num_areas) * area
        made = FetchedInfinigenResidency(shape, found, decoder, most.scratch_bytes + shape.num_slots * each)
        assert made.num_areas == num_areas
        return made

    return make


@pytest.mark.parametrize("num_areas", [2, NUM_LAYERS])
@pytest.mark.parametrize("selection", [FEW, SOME, ALL], ids=["few", "some", "all"])
def test_steps_are_those_of_the_cpu_with_lookahead(selection: Selection, num_areas: int) -> None:
    emulated = on_emulated(DECODER)
    cpu = Bench.of(DECODER, infinigen(prepared(selection, 1)), PROMPTS, 50)
    there = Bench.of(emulated, fetched(emulated, selection, num_areas), PROMPTS, 50)
    for got, wanted in zip(there.turns(50), cpu.turns(50), strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5)
    for bench in (cpu, there):
        bench.close()


def test_bytes_of_steps_are_those_of_the_link_where_layers_share_areas() -> None:
    decoder = on_emulated(DECODER)
    bench, link = Bench.of(decoder, fetched(decoder, num_areas=2), PROMPTS, 50), decoder.device.link
    for step in range(12):
        before = link.num_bytes_fetched + link.num_bytes_stored, bench.residency.num_link_bytes
        bench.run({slot: [TOKENS[step]] for slot in range(len(PROMPTS))})
        counted = bench.residency.num_link_bytes - before[1]
        assert counted == link.num_bytes_fetched + link.num_bytes_stored - before[0] > 0
    bench.close()


def test_what_stays_hot_is_not_fetched_again() -> None:
    def fetched_bytes(num_areas: int) -> int:
        decoder = on_emulated(DECODER)
        bench = Bench.of(decoder, fetched(decoder, num_areas=num_areas), PROMPTS, 50)
        before = decoder.device.link.num_bytes_fetched
        list(bench.turns(30))
        bench.close()
        return decoder.device.link.num_bytes_fetched - before

    assert fetched_bytes(NUM_LAYERS) < 0.8 * fetched_bytes(2)


@pytest.mark.parametrize("limits", [UNLIMITED, MemoryLimits(300_000)], ids=["roomy", "preempting"])
def test_answers_are_those_of_the_cpu_where_layers_share_areas(limits: MemoryLimits) -> None:
    emulated = on_emulated(DECODER)
    expected = answers(DECODER, infinigen(prepared(FEW, 1)), 30, limits)
    assert answers(emulated, fetched(emulated, num_areas=2), 30, limits) == expected


@pytest.mark.parametrize("seed", range(3))
def test_tokens_do_not_depend_on_when_copies_are_done(seed: int) -> None:
    delays = random.Random(seed)

    def slow(to: Tensor, source: Tensor) -> None:
        time.sleep(delays.choice((0.0, 0.001)))
        copy_bytes(to, source)

    emulated = on_emulated(DECODER, PoisonedDevice(LinkRate(2e7, delays.choice((0.0, 5e-4))), slow))
    assert answers(emulated, fetched(emulated), 30) == answers(DECODER, infinigen(prepared(FEW, 1)), 30)


def test_long_spans_read_home_in_pieces() -> None:
    decoder = random_decoder(num_layers=4)
    ids = prompt(2 * PIECE_TOKENS // 3)
    emulated = on_emulated(decoder)

    def there(shape: KvShape, _: MakeMemory) -> FetchedInfinigenResidency:
        return FetchedInfinigenResidency(shape, prepared(ALL, decoder=emulated), emulated)

    found = []
    for each, make in ((decoder, infinigen(prepared(ALL, 1, decoder=decoder), decoder)), (emulated, there)):
        bench = Bench.of(each, make, [ids])
        found.append(bench.run({0: TOKENS[:9]})[0])
        bench.close()
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-4)


def test_a_device_holds_no_more_than_its_limit(tmp_path: Path) -> None:
    device = PoisonedDevice()
    decoder = on_emulated(DECODER, device)
    save_prepared(prepared(FEW), tmp_path / "found.safetensors")
    config = EngineConfig(4, 128, residency="infinigen", selection_file=str(tmp_path / "found.safetensors"))
    roomy = make_memory(on_emulated(DECODER), config)
    each = roomy.residency.bytes_for(128).device
    limit = weight_bytes(decoder.weights) + roomy.residency.scratch_bytes + 4 * each - 1
    config = replace(config, device_memory_bytes=limit)
    memory = make_memory(decoder, config)
    assert isinstance(memory.residency, FetchedInfinigenResidency)
    assert memory.residency.num_areas < NUM_LAYERS
    rows = [memory.residency.open(SlotId(slot), 100, 128) for slot in range(4)]
    for row in rows:
        row.commit(TokenRange(0, 128))
    assert device.memory_use.num_bytes <= limit - weight_bytes(decoder.weights)
    for row in rows:
        row.release()


def test_a_planted_read_of_home_memory_is_found() -> None:
    decoder = on_emulated(DECODER)
    bench = Bench.of(decoder, fetched(decoder), PROMPTS, 50)
    row = bench.residency._rows[0]  # type: ignore[attr-defined]
    row.hot._kv = row.others
    with pytest.raises(WrongMemoryError, match="are host memory"):
        bench.run({0: TOKENS[:1]})
