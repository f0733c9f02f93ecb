"""Checks that a worker compiles all kernels of its steps before the first request, and that a layer of a step needs few
launches. No kernel is compiled. The functions need a process with Triton's interpreter.
"""

import dataclasses
import itertools
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from baton.modeling.forward.decoder import Decoder
from baton.modeling.forward.drawing import DrawKind, RowDraw, choose_tokens
from baton.modeling.forward.step_graphs import StepGraphs, step_shapes
from baton.modeling.forward.triton.attention import triton_kernel
from baton.modeling.forward.triton.step_inputs import StepShape
from baton.modeling.hosting import compile_decoder
from baton.modeling.kernels.triton.launch import launching_by
from baton.modeling.kv.buffers import KvBuffer
from baton.modeling.kv.pages import PageSpan
from baton.sampling_params import SamplingParams
from baton.types import SlotId, TokenRange
from generate_workers.compiling import compile_steps
from generate_workers.config import EngineConfig
from generate_workers.residency.paged import PagedResidency
from generate_workers.residency.port import KvShape, Residency
from generate_workers.speculation.streaming_view import NarrowSpan
from tests.support.engines import fetching
from tests.support.engines.devices import TensorDevice
from tests.support.engines.generation import harness, prompt
from tests.support.kernels.paged_rows import in_pages
from tests.support.kernels.triton.launches import CountedOps, Recorder, as_on_a_gpu
from tests.support.kernels.triton.steps import decode_step
from tests.support.models.tiny_models import random_decoder

LONG, SHORT = 40_000, 640
"""Maximum numbers of tokens of a sequence."""
OVER_PAGES = {"append_token", "attend_split", "merge_splits", "attend_span"}
POINTWISE = {"norm_token", "gate_tile", "turn_heads"}
SAMPLER = {"find_largest", "count_keys", "draw_part", "choose_best"}
GREEDY_DRAW = RowDraw(key=0, top_k=97, floor=-math.inf, top_p=1.0, temperature=0.0)
GREEDY = SamplingParams(max_tokens=8, ignore_eos=True)
PARAMS = (
    dataclasses.replace(GREEDY, temperature=1.0, seed=3),
    dataclasses.replace(GREEDY, temperature=0.8, top_k=20, top_p=0.9, seed=4),
    dataclasses.replace(GREEDY, temperature=0.8, presence_penalty=0.1, seed=5),
    GREEDY,
)
"""Sampling parameters of an engine's sequences: all kinds of draws, on the device and after changes by the host."""
LENGTHS = (70, 130, 1, 17, 33)


def decoder_for(max_tokens: int, window: int | None = None, num_layers: int = 2) -> Decoder:
    """Return a decoder on a CPU device that replaces a GPU. Triton's kernels compute all of its attention."""
    shape = {"max_position": max_tokens, "window": window, "num_layers": num_layers}
    made = random_decoder(**shape, device=TensorDevice())  # type: ignore[arg-type]
    made._has_native_rows, made.has_triton_rows, made.fused, made.kernel = False, True, None, triton_kernel
    return made


def compiled_keys(decoder: Decoder, residency: Residency, max_tokens: int, *, runs: bool = False) -> set[str]:
    """Return the specialization keys of the kernels that a generation worker compiles before it is ready. The kernels
    run only if `runs` is set."""
    recorder = Recorder(runs=runs)
    with launching_by(recorder):
        compile_decoder(decoder)
        compile_steps(decoder, residency, EngineConfig(max_slot_tokens=max_tokens))
    return recorder.keys


def check_known(found: set[str], compiled: set[str], names: set[str]) -> None:
    """Assert that all keys were compiled, and that kernels of all given names were launched."""
    assert {key.split()[0] for key in found} == names
    unseen = sorted(found - compiled)
    assert not unseen, f"not compiled before the first request: {unseen}"


def check_shapes(window: int | None) -> None:
    """Check random steps of sequences of up to LONG tokens. Nothing is computed."""
    rng, recorder = random.Random(5), Recorder(runs=False)
    with as_on_a_gpu():
        decoder = decoder_for(LONG, window)
        residency = PagedResidency(KvShape(decoder.layout, (window,) * 2, 6, LONG), decoder.device)
        compiled = compiled_keys(decoder, residency, LONG)
        with launching_by(recorder), torch.inference_mode():
            for _ in range(60):
                _random_step(decoder, residency, rng)
    check_known(recorder.keys, compiled, OVER_PAGES | POINTWISE)


def _random_step(decoder: Decoder, residency: PagedResidency, rng: random.Random) -> None:
    rows, parts = [], []
    for slot in rng.sample(range(6), rng.randint(1, 6)):
        num_new = rng.choice([1, 1, 2, 3, 9, 16, 17, 40, 300])
        end = rng.choice([num_new, rng.randint(num_new, 600), rng.randint(32_769, LONG)])
        rows.append(residency.open(SlotId(slot), end, LONG))
        parts.append((SlotId(slot), TokenRange(end - num_new, end)))
    rng.shuffle(rows)
    with residency.step(parts) as step:
        spans = list(step.spans)
        if decoder.config.windows[0] is None and rng.random() < 0.3:
            spans = [NarrowSpan(span, TokenRange(0, 1)) if len(span.tokens) == 1 else span for span in spans]
        decoder.forward([0] * sum(len(span.tokens) for span in spans), spans, most_queries=9)
    for row in rows:
        row.release()


def check_engine(window: int | None, options: dict[str, Any]) -> None:
    """Check an engine whose sequences join, are prefilled in chunks, verify drafts, and leave. Kernels run in Triton's
    interpreter. `options`: options of the test harness."""
    recorder = Recorder(runs=True)
    sizes: dict[str, Any] = {
        "num_slots": 3,
        "max_slot_tokens": SHORT,
        "max_batched_tokens": 64,
        "policy": "device",
    } | options
    with as_on_a_gpu(), harness(decoder=decoder_for(SHORT, window), **sizes) as made:
        residency, ledger = made.slots.memory.residency, made.slots.ledger()
        compiled = compiled_keys(made.decoder, residency, SHORT)
        assert made.slots.ledger() == ledger
        assert not isinstance(residency, PagedResidency) or residency.pool.num_taken == 0, "pages were left behind"
        with launching_by(recorder):
            for length, params in zip(LENGTHS, itertools.cycle(PARAMS), strict=False):
                made.submit(prompt(length), params)
                made.engine.step()
            made.run()
    names = OVER_PAGES if sizes["policy"] == "device" else {"attend_block"}
    if window is not None:
        names = names - {"merge_splits"}  # the keys of a small window are not divided
    check_known(recorder.keys, compiled, names | POINTWISE | SAMPLER)


def check_infinigen() -> None:
    """Check an engine that selects keys, and fetches them by Triton's kernels."""
    recorder, device = Recorder(runs=True), fetching.standing("launched")
    with as_on_a_gpu():
        decoder = fetching.on_gpu(random_decoder(num_layers=4), device)
        policy = fetching.policy(decoder, 2)
        with harness(decoder=decoder, policy=policy, max_slot_tokens=64, max_batched_tokens=24) as made:
            compiled = compiled_keys(decoder, made.slots.memory.residency, 64, runs=True)
            with launching_by(recorder):
                for length in (40, 19, 5):
                    made.submit(prompt(length), GREEDY)
                    made.engine.step()
                made.run()
    names = {"append_token", "attend_split", "attend_block", "copy_pairs", "copy_words"}
    check_known(recorder.keys, compiled, names | POINTWISE)


@torch.inference_mode()
def check_budgets() -> None:
    """Check the numbers of kernel launches of a layer, by Triton or torch. They depend neither on the number of
    sequences nor on their pages."""
    news = [[40, 40], [1, 40], [1] * 9 + [5, 9, 17, 90, 33], [1, 1, 1, 100], [1] * 12]
    with as_on_a_gpu():
        assert [_per_layer(each, _forward) for each in news] == [10, 12, 12, 12, 11]
        assert [_per_layer([1] * num_rows, _whole_step) for num_rows in (1, 8)] == [11, 11]


def check_traceable() -> None:
    """Check that steps of all shapes, and the drawing of their tokens, have no sizes that depend on data, and that the
    host reads no results: they run with tensors that have no data."""
    with as_on_a_gpu():
        decoder = decoder_for(640)
        pages_LPS2GH = TensorDevice().pool_memory(decoder.layout, 4, 64).data_LPS2GH
        shapes = step_shapes(decoder, 16, 100, drafts=True)
        graphs = StepGraphs(decoder, pages_LPS2GH, 10, shapes, captures=False)
        assert {shape.most_queries for shape in shapes} == {1, 2, 4, 9, 16}
        with launching_by(Recorder(runs=False)), FakeTensorMode(allow_non_fake_inputs=True), torch.inference_mode():
            for shape in shapes:
                logits_RV = graphs._forward(shape)
                assert logits_RV.shape == (shape.num_results, decoder.config.vocab_size)
                for kind in DrawKind:
                    draws = graphs._inputs[shape].draws
                    assert choose_tokens(logits_RV, draws, kind).shape == (shape.num_results,)


def _per_layer(news: Sequence[int], run: Callable[[Decoder, list[PageSpan]], object]) -> int:
    """Return the number of launches of one layer of a step of sequences with `news` new tokens."""
    found = []
    for num_layers in (2, 4):
        decoder, recorder = decoder_for(640, num_layers=num_layers), Recorder(runs=False)
        spans = _spans(decoder, news)
        with launching_by(recorder), CountedOps() as ops:
            run(decoder, spans)
        found.append(recorder.num_launches + len(ops.names))
    assert (found[1] - found[0]) % 2 == 0, found
    return (found[1] - found[0]) // 2


def _spans(decoder: Decoder, news: Sequence[int]) -> list[PageSpan]:
    """Return spans of sequences of 640 tokens at most, in scattered pages of 16 tokens."""
    rows = in_pages([KvBuffer(decoder.layout, TokenRange(0, 640)) for _ in news], 16)
    ends = [num_new + 16 * row for row, num_new in enumerate(news)]
    return [PageSpan(row, TokenRange(end - new, end)) for row, end, new in zip(rows, ends, news, strict=True)]


def _forward(decoder: Decoder, spans: list[PageSpan]) -> object:
    return decoder.forward([0] * sum(len(span.tokens) for span in spans), spans, most_queries=9)


def _whole_step(decoder: Decoder, spans: list[PageSpan]) -> object:
    table, size = spans[0].pages.table, len(spans)
    shapes = [StepShape(size, size, size, 1, size)]
    graphs = StepGraphs(decoder, table.data_LPS2GH, len(table.pages_C), shapes, captures=False)
    return graphs.launch(*decode_step([[0] * 40] * size, [GREEDY_DRAW] * size, [span.pages for span in spans]))
