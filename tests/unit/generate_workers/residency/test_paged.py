"""Rows in pages on an emulated device: who shares pages, when they are copied, and when they are free."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from baton.errors import ConfigError
from baton.modeling.device.emulated import EmulatedDevice
from baton.modeling.forward.weight_sizes import weight_bytes
from baton.modeling.kv.buffers import byte_view
from baton.modeling.kv.pages import PAGE_TOKENS
from baton.modeling.prefix_store.store import Filled
from baton.prefix_blocks import BlockNaming, PromptBlocks
from baton.sampling_params import SamplingParams
from baton.transport.kv_sink import ReserveSpec
from baton.types import RequestId, SlotId, TokenRange
from generate_workers.config import EngineConfig
from generate_workers.engine.memory_limits import make_memory
from generate_workers.engine.rows import GenerationRequest
from generate_workers.prefixes.answer_saving import StreamAnswers
from generate_workers.prefixes.loading import PrefixLoader
from generate_workers.residency.paged import PagedResidency
from generate_workers.residency.port import KvShape
from generate_workers.slots.kv_memory import MemoryLimits
from tests.support.engines.chains import until
from tests.support.engines.devices import PoisonedDevice, on_emulated
from tests.support.engines.generation import Collector, Harness, eos_decoder, harness, prompt, reference_ids
from tests.support.engines.prefixes import store_in

DECODER = eos_decoder()
LAYOUT = DECODER.layout
PARAMS = SamplingParams(max_tokens=9, ignore_eos=True)
CHOICES = replace(PARAMS, n=4, temperature=0.9, seed=7)
LONG = prompt(2 * PAGE_TOKENS + 20)
MOST = 4 * PAGE_TOKENS


def residency_of(made: Harness) -> PagedResidency:
    residency = made.slots.memory.residency
    assert isinstance(residency, PagedResidency)
    return residency


@pytest.mark.parametrize("is_pushed", [False, True])
def test_choices_share_their_prompts_whole_pages(is_pushed: bool) -> None:
    with harness(decoder=on_emulated(DECODER), num_slots=4, max_slot_tokens=MOST) as made:
        pool = residency_of(made).pool
        ref = None
        if is_pushed:
            ref = made.reserve(len(LONG), len(LONG) + 9, num_choices=4).ref
            made.push_and_commit(ref, LONG, CHOICES)
            assert pool.num_taken == 3
        collector = made.submit(LONG, CHOICES, ref=ref)[1]
        most = 0
        while not collector.ended.is_set():
            made.engine.step()
            most = max(most, pool.num_taken)
        assert most == 2 + 4
        for choice in range(4):
            expected = reference_ids(DECODER, LONG, CHOICES.of_choice(choice))
            assert collector.choice(choice).token_ids == expected
        made.run()
        assert pool.num_taken == 0


def test_the_device_counts_each_page_once_and_holds_what_is_promised() -> None:
    """A limit for all choices' promises is one that no step exceeds, whatever they copy."""
    device = PoisonedDevice()
    decoder = on_emulated(DECODER, device)
    page_bytes = PAGE_TOKENS * LAYOUT.token_bytes
    device.bound(12 * page_bytes)
    limits = MemoryLimits(1 << 40, 12 * page_bytes)
    with harness(decoder=decoder, num_slots=4, limits=limits, growth_tokens=1, max_slot_tokens=MOST) as made:
        made.answer(LONG, CHOICES)
    assert device.memory_use.peak_bytes == 6 * page_bytes
    assert device.memory_use.num_bytes == 0


def test_pushed_kv_is_read_back_from_pages_that_are_not_adjacent() -> None:
    device = PoisonedDevice()
    residency = PagedResidency(KvShape(LAYOUT, (None, None), 2, 64), device, page_tokens=4)
    rows = [residency.open(SlotId(slot), 10, 40) for slot in range(2)]
    data = byte_view(torch.arange(40 * LAYOUT.row_bytes // 4).float())
    for start in range(0, 40, 5):
        tokens = TokenRange(start, start + 5)
        for row in rows:
            for layer in range(LAYOUT.num_layers):
                row.write(layer, tokens, data[start * LAYOUT.row_bytes : (start + 5) * LAYOUT.row_bytes]).result()
    for row in rows:
        assert row.export(1, TokenRange(3, 39)) == data[3 * LAYOUT.row_bytes : 39 * LAYOUT.row_bytes]
        row.release()
    assert device.memory_use.num_bytes == 0
    residency.close()


async def test_a_prompt_begins_with_the_pages_of_an_answer(folder: Path) -> None:
    """Nothing crosses the link for blocks that a row which has ended had in pages."""
    decoder = on_emulated(DECODER)
    store = store_in(folder, LAYOUT)
    naming = BlockNaming(PAGE_TOKENS, "salt")
    with harness(decoder=decoder, store=store, num_slots=4, max_slot_tokens=MOST) as made:
        residency, filled, events = residency_of(made), list[Filled](), Collector(num_choices=1)
        assert made.saver is not None
        answers = StreamAnswers(made.saver, naming, filled.append)
        made.engine.submit(GenerationRequest(RequestId("r"), LONG, (), PARAMS), events, answers)
        made.run(events)
        until(lambda: bool(filled))
        assert [len(each.stored) for each in filled] == [2]
        assert residency.pool.num_taken == 2
        before = decoder.device.link.num_bytes_fetched
        names = PromptBlocks.of(LONG, PAGE_TOKENS, LAYOUT.fingerprint, naming.salt).names
        loader = PrefixLoader(made.slots, store)
        spec = ReserveSpec(RequestId("s"), 1, len(LONG), len(LONG) + 9, 5.0, prefix_blocks=names)
        lease = await loader.reserve(replace(spec, block_tokens=PAGE_TOKENS, prefills_locally=True))
        await loader.close()
        assert lease.num_present_tokens == 2 * PAGE_TOKENS
        assert decoder.device.link.num_bytes_fetched == before
        again = made.submit(LONG, PARAMS, ref=lease.ref)[1]
        made.run()
        assert again.token_ids == events.token_ids == reference_ids(DECODER, LONG, PARAMS)
        residency.close()
        assert residency.pool.num_taken == 0


@pytest.mark.parametrize("kv_tokens", [0, 3 * PAGE_TOKENS])
def test_the_pool_is_as_large_as_the_limits_allow(kv_tokens: int) -> None:
    """Cached blocks take what rows leave of the memory for KV, and no more."""
    decoder = on_emulated(DECODER, EmulatedDevice())
    token_bytes = LAYOUT.token_bytes
    device_bytes = weight_bytes(decoder.weights) + 5 * PAGE_TOKENS * token_bytes
    config = EngineConfig(4, 4 * PAGE_TOKENS, device_memory_bytes=device_bytes, kv_memory_bytes=kv_tokens * token_bytes)
    memory = make_memory(decoder, config)
    assert isinstance(memory.residency, PagedResidency)
    pool = memory.residency.pool
    assert (pool.num_pages, pool.most_taken) == ((3, 3) if kv_tokens else (5, 5))
    with pytest.raises(ConfigError, match="less than one token of KV takes"):
        make_memory(decoder, replace(config, device_memory_bytes=weight_bytes(decoder.weights) + token_bytes))
