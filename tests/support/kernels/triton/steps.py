"""Checks of decode steps over pages by Triton against a decoder on the CPU with contiguous KV.

L layers, P pages, S tokens per page, G KV heads, H head dim, C pages per sequence.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from baton.modeling.checkpoints.weights import load_decoder
from baton.modeling.device.cpu import CpuDevice
from baton.modeling.device.port import Device
from baton.modeling.forward.attention import plain_kernel
from baton.modeling.forward.decoder import Decoder
from baton.modeling.forward.drawing import NO_TOKEN, RowDraw
from baton.modeling.forward.sampling import SamplerState, sample
from baton.modeling.forward.step_graphs import StepGraphs, step_shapes
from baton.modeling.forward.triton.step_inputs import StepShape, StepTokens
from baton.modeling.kv.buffers import HOME, BufferSpan, KvBuffer
from baton.modeling.kv.pages import PagePool, PageSpan, RowPages
from baton.modeling.kv.pool_memory import TensorPool
from baton.sampling_params import SamplingParams
from baton.types import SampledToken, TokenRange
from generate_workers.speculation.streaming_view import NarrowSpan
from tests.support.models.tiny_models import random_decoder

PAGE_TOKENS, NUM_STEPS, SIZES = 8, 10, (2, 4)
STEPS = ((1,), (1, 1, 1), (3, 1), (4, 9, 2), (20, 1, 1), (20, 17, 5), (22, 1, 1, 1), (60, 1), (16, 1), (17,))
"""Numbers of new tokens of the sequences of steps."""
MOST_DRAWN = 4 * 9
"""Number of tokens that all sequences can have with drafts. No captured step has as many."""
_GREEDY_DRAW = RowDraw(key=0, top_k=2**62, floor=-math.inf, top_p=1.0, temperature=0.0)
LENGTHS = (13, 1, 30)
"""Numbers of tokens of the sequences at the start. The last step starts new pages."""
PARAMS = (
    SamplingParams(temperature=0.9, top_p=0.8, seed=3),
    SamplingParams(temperature=1.3, seed=2**64 - 1),
    SamplingParams(),
)
"""Sampling parameters of the sequences. Steps with the first two sequences also apply filters."""


def check_steps(device: Device | None = None, *, captures: bool = False, window: int | None = None) -> None:
    """Assert that the sequences get the CPU's tokens: first three sequences in a step built for four, then two in a
    step built for two."""
    shape = {"num_layers": 2, "head_dim": 16, "window": window}
    cpu = random_decoder(**shape, kernel=plain_kernel)  # type: ignore[arg-type]
    there = random_decoder(**shape, kernel=plain_kernel, device=device or CpuDevice())  # type: ignore[arg-type]
    _check(cpu, there, captures)


def check_family_steps(folder: Path) -> None:
    """Assert that the sequences get the CPU's tokens with the model in `folder`, whose layers are composed differently.
    Steps are not captured."""
    made = load_decoder(folder)
    decoder = Decoder(made.config, made.weights, plain_kernel)
    _check(decoder, decoder, captures=False)


def _check(cpu: Decoder, there: Decoder, captures: bool) -> None:
    prompts = [[(7 * at + 3 * row) % 90 for at in range(length)] for row, length in enumerate(LENGTHS)]
    buffers = [_prefilled(cpu, ids) for ids in prompts]
    pages = _pages(there, prompts, buffers)
    pages_LPS2GH = pages[0].table.data_LPS2GH
    is_unwritten = pages_LPS2GH.isnan()
    shapes = [StepShape(size, size, size, 1, size) for size in SIZES]
    graphs = StepGraphs(there, pages_LPS2GH, len(pages[0].table.pages_C), shapes, captures=captures)
    assert torch.equal(pages_LPS2GH.isnan(), is_unwritten), "padding wrote KV"
    expected = [_drawn(cpu, *each) for each in zip(prompts, buffers, PARAMS, strict=True)]
    states = [SamplerState(params, ids) for params, ids in zip(PARAMS, prompts, strict=True)]
    step: tuple[StepTokens, list[PageSpan]]
    for num_rows, num_steps in ((3, NUM_STEPS // 2), (2, NUM_STEPS - NUM_STEPS // 2)):
        for _ in range(num_steps):
            histories = [[*ids, *state.output_ids] for ids, state in zip(prompts, states, strict=True)][:num_rows]
            draws = [draw for state in states[:num_rows] if (draw := state.row_draw()) is not None]
            step = decode_step(histories, draws, pages)
            for state, token in zip(states, graphs.launch(*step).result(), strict=False):
                state.append(token.token_id)
    assert [state.output_ids for state in states] == [*expected[:2], expected[2][: NUM_STEPS // 2]]
    pages_LPS2GH[-1, pages[0].table.pages_C.to(pages_LPS2GH.device)] = torch.nan
    found = [token.token_id for token in graphs.launch(*step).result()]
    assert found == [NO_TOKEN, expected[1][-1]], "the last step again, with damaged KV in one row"


@torch.inference_mode()
def check_shapes(device: Device | None = None, *, captures: bool = False) -> None:
    """Assert that random steps have the logits and KV of the CPU, in all kinds of shapes: sequences decode, verify
    drafts, and prefill chunks. Steps run with padding, and some fit into no shape."""
    rng, model = random.Random(4), {"num_layers": 2, "head_dim": 16, "kernel": plain_kernel}
    cpu = random_decoder(**model)  # type: ignore[arg-type]
    there = random_decoder(**model, device=device or CpuDevice())  # type: ignore[arg-type]
    memory = TensorPool(there.layout, 80, PAGE_TOKENS, there.device.torch_device, HOME)
    memory.data_LPS2GH.fill_(torch.nan)
    pool = PagePool(memory)
    shapes = [*step_shapes(there, 4, 28, drafts=True), StepShape(24, 3, 4, 16, 20, 3, 24)]
    graphs = StepGraphs(there, memory.data_LPS2GH, 16, shapes, captures=captures)
    for number in range(20):
        sizes = STEPS[number % len(STEPS)]
        ends = [size + rng.choice((0, 3, 20)) for size in sizes]
        buffers = [_random_kv(cpu, end, number) for end in ends]
        pages = _copies(buffers, ends, pool, 16)
        token_ids = [rng.randrange(90) for _ in range(sum(sizes))]
        new = [TokenRange(end - size, end) for size, end in zip(sizes, ends, strict=True)]
        results = sorted(rng.sample(range(len(token_ids)), min(rng.randint(0, 3), len(token_ids))))
        positions = [at for tokens in new for at in range(tokens.start, tokens.end)]
        step = StepTokens(token_ids, [-1] * len(token_ids), positions, results, None)
        spans = [PageSpan(row, tokens) for row, tokens in zip(pages, new, strict=True)]
        for home in graphs._homes:
            home.fill_(0x77)  # what an earlier step of another shape wrote must not be read
        found_RV = graphs.logits(step, spans).cpu()
        hidden_RD = cpu.forward(token_ids, [BufferSpan(*each) for each in zip(buffers, new, strict=True)])[results]
        if results:
            torch.testing.assert_close(found_RV, cpu.logits(hidden_RD), atol=1e-4, rtol=1e-4)
        draws = [_GREEDY_DRAW] * min(len(token_ids), MOST_DRAWN)
        drawn = replace(step, results=range(len(draws)), draws=draws)
        hidden_TD = cpu.forward(token_ids, [BufferSpan(*each) for each in zip(buffers, new, strict=True)])
        expected_R = cpu.logits(hidden_TD[: len(draws)]).argmax(-1)
        assert graphs.launch(drawn, spans).result() == list(map(SampledToken, expected_R.tolist()))
        for row, buffer in zip(pages, buffers, strict=True):
            for layer in range(2):
                for part, kv_T2GH in row.spans(layer, buffer.tokens):
                    torch.testing.assert_close(kv_T2GH.cpu(), buffer.span(layer, part), atol=1e-4, rtol=1e-4)
            row.release()
        assert pool.num_taken == 0


@torch.inference_mode()
def check_left_out_pages(device: Device | None = None, *, captures: bool = False) -> None:
    """Assert that a step does not attend to pages whose keys are all left out, and attends to all other keys."""
    cpu, there = random_decoder(), random_decoder(device=device or CpuDevice())
    lengths = 5 * PAGE_TOKENS, PAGE_TOKENS + 9
    buffers = [_random_kv(cpu, length, length) for length in lengths]
    memory = TensorPool(there.layout, 12, PAGE_TOKENS, there.device.torch_device, HOME)
    memory.data_LPS2GH.fill_(torch.nan)
    graphs = StepGraphs(there, memory.data_LPS2GH, 6, step_shapes(there, 2), captures=captures)
    pages = _copies(buffers, lengths, PagePool(memory), 6)
    new = [TokenRange(length - 1, length) for length in lengths]
    unseen = [TokenRange(3, 4 * PAGE_TOKENS + 5), TokenRange(3, PAGE_TOKENS + 2)]
    pages_left_out = TokenRange(PAGE_TOKENS, 4 * PAGE_TOKENS)
    spans = [NarrowSpan(PageSpan(row, tokens), keys) for row, tokens, keys in zip(pages, new, unseen, strict=True)]
    positions = [length - 1 for length in lengths]
    found_RV = graphs.logits(StepTokens([7, 8], [-1, -1], positions, range(2), None), spans)
    ours = [BufferSpan(*each) for each in zip(buffers, new, strict=True)]
    expected_RD = cpu.forward([7, 8], [NarrowSpan(ours[0], pages_left_out), ours[1]])
    torch.testing.assert_close(found_RV.cpu(), cpu.logits(expected_RD), atol=1e-4, rtol=1e-4)


def _random_kv(decoder: Decoder, num_tokens: int, seed: int) -> KvBuffer:
    buffer = KvBuffer(decoder.layout, TokenRange(0, num_tokens))
    buffer.data.normal_(generator=torch.Generator().manual_seed(seed))
    return buffer


def decode_step(
    histories: Sequence[Sequence[int]], draws: Sequence[RowDraw] | None, pages: Sequence[RowPages]
) -> tuple[StepTokens, list[PageSpan]]:
    """Return a step that computes the last token of each sequence, and its spans. `histories`: all tokens of each
    sequence. `pages`: their pages; further ones are ignored."""
    num_rows, ends = len(histories), [len(ids) for ids in histories]
    spans = [PageSpan(row, TokenRange(end - 1, end)) for row, end in zip(pages, ends, strict=False)]
    positions = [end - 1 for end in ends]
    tokens = StepTokens([ids[-1] for ids in histories], [-1] * num_rows, positions, range(num_rows), draws)
    return tokens, spans


def _pages(decoder: Decoder, prompts: Sequence[Sequence[int]], buffers: Sequence[KvBuffer]) -> list[RowPages]:
    """Return pages of sequences with the given prompts, whose last token has no KV yet. Unwritten KV is NaN."""
    row_pages = -(-(max(LENGTHS) + NUM_STEPS) // PAGE_TOKENS)
    where = decoder.device.torch_device
    memory = TensorPool(decoder.layout, len(prompts) * row_pages, PAGE_TOKENS, where, HOME)
    memory.data_LPS2GH.fill_(torch.nan)
    return _copies(buffers, [len(ids) - 1 for ids in prompts], PagePool(memory), row_pages)


def _copies(buffers: Sequence[KvBuffer], nums_tokens: Sequence[int], pool: PagePool, row_pages: int) -> list[RowPages]:
    """Return copies of the first tokens of buffers in pages of sequences, each of which has `row_pages` pages. The
    pages of a sequence are not adjacent. `nums_tokens`: number of tokens to copy from each buffer."""
    rows = [RowPages(pool, row_pages * pool.page_tokens) for _ in buffers]
    for end in range(pool.page_tokens, row_pages * pool.page_tokens + 1, pool.page_tokens):
        for row in reversed(rows):
            row.prepare(TokenRange(end - pool.page_tokens, end), 0)
    for row, buffer, num_tokens in zip(rows, buffers, nums_tokens, strict=True):
        for layer in range(buffer.layout.num_layers):
            for part, kv_T2GH in row.spans(layer, TokenRange(0, num_tokens)):
                kv_T2GH.copy_(buffer.span(layer, part))
    return rows


@torch.inference_mode()
def _prefilled(decoder: Decoder, ids: Sequence[int]) -> KvBuffer:
    """Return the KV of all tokens except the last, with room for further tokens."""
    buffer = KvBuffer(decoder.layout, TokenRange(0, len(ids) + NUM_STEPS))
    if len(ids) > 1:
        decoder.forward(ids[:-1], [BufferSpan(buffer, TokenRange(0, len(ids) - 1))])
    return buffer


@torch.inference_mode()
def _drawn(decoder: Decoder, ids: Sequence[int], buffer: KvBuffer, params: SamplingParams) -> list[int]:
    """Return the tokens that follow, sampled by the host."""
    state, token = SamplerState(params, ids), ids[-1]
    for at in range(len(ids) - 1, len(ids) - 1 + NUM_STEPS):
        hidden_TD = decoder.forward([token], [BufferSpan(buffer, TokenRange(at, at + 1))])
        token = sample(decoder.logits(hidden_TD), [state])[0].token_id
        state.append(token)
    return state.output_ids
