"""Engines whose whole decode steps run on a device, compared with the CPU. The kernels run in Triton's interpreter or
on a GPU."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from baton.modeling.device.port import Device
from baton.modeling.forward.decoder import Decoder
from baton.modeling.forward.drawing import Draws
from baton.modeling.forward.step_graphs import StepGraphs
from baton.modeling.forward.triton.step_inputs import StepTokens
from baton.modeling.kv.pages import PAGE_TOKENS, PageSpan
from baton.sampling_params import SamplingParams
from baton.types import TokenRange
from generate_workers.residency.paged import PagedResidency
from generate_workers.slots.kv_memory import MemoryLimits
from tests.support.engines.devices import TensorDevice
from tests.support.engines.generation import (
    Harness,
    eos_decoder,
    harness,
    prefilled,
    prompt,
    reference_ids,
    sampled_next,
)
from tests.support.engines.slot_tables import push_buffer
from tests.support.models.tiny_models import random_decoder
from tests.support.models.tiny_tokenizer import EOS_ID

MAX_TOKENS = 96
GREEDY = SamplingParams(max_tokens=6, ignore_eos=True)
DRAWN = dataclasses.replace(GREEDY, temperature=1.2, seed=2**64 - 5)
FILTERED = dataclasses.replace(DRAWN, top_p=0.8, top_k=30, min_p=0.01, seed=4)
BY_HOST = dataclasses.replace(FILTERED, repetition_penalty=1.3, logprobs=1, max_tokens=2)


def counted(steps: StepGraphs) -> list[int]:
    """Return a list to which the number of sequences of each further step is added."""
    num_rows, prepared = list[int](), steps._prepared

    def prepare(tokens: StepTokens, spans: Sequence[PageSpan]) -> Callable[[], tuple[Tensor, Draws | None]]:
        num_rows.append(len(spans))
        return prepared(tokens, spans)

    vars(steps)["_prepared"] = prepare
    return num_rows


def decoder_on(device: Device) -> Decoder:
    """Return the CPU's decoder on a device. Triton's kernels compute its decode attention, and its prefill attention
    over pages; on a GPU, also that over buffers."""
    decoder = random_decoder(device=device)
    decoder.config = dataclasses.replace(decoder.config, eos_token_ids=(EOS_ID,))
    decoder._has_native_rows, decoder.has_triton_rows, decoder.fused = False, True, None
    return decoder


@contextmanager
def engine_on(
    device: Device | None, *, step_graphs: bool = True, **options: Any
) -> Iterator[tuple[Harness, list[int]]]:
    """Run an engine on a device, by default a CPU device that replaces a GPU. Yield the engine and a list with the
    number of sequences of each whole step."""
    options = {"max_slot_tokens": MAX_TOKENS} | options
    with harness(decoder=decoder_on(device or TensorDevice()), step_graphs=step_graphs, **options) as made:
        runner = made.engine._pipeline._runner
        if not step_graphs:
            assert runner._device_steps is None
            yield made, []
            return
        assert runner._device_steps is not None
        yield made, counted(runner._device_steps)


def check_joining_and_leaving(device: Device | None = None, *, step_graphs: bool = True) -> None:
    """Check that sequences of all kinds that join and leave while others decode get the CPU's tokens."""
    cpu = eos_decoder()
    asked = [(63, GREEDY), (5, FILTERED), (1, DRAWN), (9, BY_HOST)]
    with engine_on(device, step_graphs=step_graphs, num_slots=3) as (made, num_rows):
        streams = []
        for length, params in asked:
            streams.append(made.submit(prompt(length), params)[1])
            for _ in range(3):
                made.engine.step()
        made.run()
        for (length, params), stream in zip(asked, streams, strict=True):
            assert stream.token_ids == reference_ids(cpu, prompt(length), params), (length, params)
    if step_graphs:
        assert set(num_rows) == {1, 2, 3}


def check_choices(device: Device | None = None) -> None:
    """Check that choices share the pages of their prompt, and that each copies the last page before it writes to it."""
    cpu, params = eos_decoder(), dataclasses.replace(FILTERED, n=3)
    with engine_on(device) as (made, num_rows):
        answer = made.answer(prompt(20), params)
        for number in range(3):
            assert answer.choice(number).token_ids == reference_ids(cpu, prompt(20), params.of_choice(number))
    assert num_rows == [1, 1] + [3] * (params.max_tokens - 1)


def check_preemption(device: Device | None = None) -> None:
    """Check that sequences that need more memory than is available are preempted, and continue with the same tokens."""
    cpu, there = eos_decoder(), device or TensorDevice()
    page_bytes = PAGE_TOKENS * cpu.layout.token_bytes
    limits = MemoryLimits(1 << 40, 3 * page_bytes)
    asked = [(63, DRAWN), (62, GREEDY)]
    with engine_on(there, limits=limits, growth_tokens=1, max_batched_tokens=64) as (made, num_rows):
        streams = [made.submit(prompt(length), params)[1] for length, params in asked]
        made.run()
        assert made.engine.status().num_preemptions == 1
        for (length, params), stream in zip(asked, streams, strict=True):
            assert stream.token_ids == reference_ids(cpu, prompt(length), params)
    assert {1, 2} <= set(num_rows)


def check_shared_prefixes(device: Device | None = None) -> None:
    """Check that a sequence gets the correct tokens if it starts with pages of another sequence's block while that
    sequence decodes."""
    cpu, params, names, ids = eos_decoder(), FILTERED, ["a block"], prompt(70)
    with engine_on(device) as (made, num_rows):
        first = made.reserve(70, 80)
        made.push_and_commit(first.ref, ids, params)
        made.slots.keep_prefix(first.ref, names, PAGE_TOKENS)
        _, stream = made.submit(ids, params, ref=first.ref)
        for _ in range(2):
            made.engine.step()
        second = made.reserve(70, 80)
        assert made.slots.begin_with(second.ref, names, PAGE_TOKENS) == PAGE_TOKENS
        buffer, _ = prefilled(made.decoder, ids)
        push_buffer(made.slots, second.ref, buffer, TokenRange(PAGE_TOKENS, 70))
        made.commit(second.ref, sampled_next(made.decoder, ids, (), params))
        _, other = made.submit(ids, params, ref=second.ref)
        made.run()
        assert stream.token_ids == other.token_ids == reference_ids(cpu, ids, params)
    assert set(num_rows) == {1, 2}


def check_fragmented_prompts(device: Device | None = None, *, speculation: str = "off") -> None:
    """Check that sequences get the CPU's tokens if no two of their pages are adjacent. Their prompts are computed in
    chunks, while others decode or verify drafts."""
    cpu, params = eos_decoder(), dataclasses.replace(DRAWN, max_tokens=8)
    sizes: dict[str, Any] = {"max_slot_tokens": 256, "num_slots": 6, "max_batched_tokens": 48}
    with engine_on(device, speculation=speculation, **sizes) as (made, _):
        residency = made.slots.memory.residency
        assert isinstance(residency, PagedResidency)
        pages = residency.pool.take(residency.pool.num_pages)
        residency.pool.give(pages[::2])
        asked = [prompt(length) for length in (7, 230, 150)]
        streams = []
        for ids in asked:
            streams.append(made.submit(ids, params)[1])
            made.engine.step()
        made.run()
        for ids, stream in zip(asked, streams, strict=True):
            assert stream.token_ids == reference_ids(cpu, ids, params), len(ids)
        residency.pool.give(pages[1::2])


def check_made() -> None:
    """Check that engines run whole steps if their configuration says so and the device has its own memory."""
    for options, expected in (({}, [1, 2, 4, 5]), ({"step_graphs": False}, None), ({"policy": "host"}, None)):
        with harness(decoder=decoder_on(TensorDevice()), num_slots=5, **options) as made:
            steps = made.engine._pipeline._runner._device_steps
            sizes = [shape.num_rows for shape in steps.shapes if shape.most_queries == 1] if steps else None
            assert sizes == expected
