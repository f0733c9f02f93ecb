"""Steps over pages by Triton, against a decoder on the CPU that keeps KV in one piece.

L layers, P pages, S tokens of a page, G kv heads, H head dim, C pages of a row.
"""

from collections.abc import Sequence

import torch

from baton.types import TokenRange
from modeling.device.cpu import CpuDevice
from modeling.device.port import Device
from modeling.forward.attention import plain_kernel
from modeling.forward.decoder import Decoder
from modeling.forward.step_graphs import PagedSteps, StepGraphs
from modeling.kv.buffers import BufferSpan, KvBuffer
from tests.support.models.tiny_models import random_decoder

PAGE_TOKENS, NUM_STEPS, SIZES = 8, 10, (2, 4)
LENGTHS = (13, 1, 30)
"""Tokens of the rows at first: the last step begins new pages."""


def check_steps(device: Device | None = None, *, captures: bool = False, window: int | None = None) -> None:
    """Assert that the rows' tokens are those of the CPU: three rows in the step for four, then two in that for two."""
    shape = {"num_layers": 2, "head_dim": 16, "window": window}
    cpu = random_decoder(**shape, kernel=plain_kernel)  # type: ignore[arg-type]
    there = random_decoder(**shape, kernel=plain_kernel, device=device or CpuDevice())  # type: ignore[arg-type]
    prompts = [[(7 * at + 3 * row) % 90 for at in range(length)] for row, length in enumerate(LENGTHS)]
    buffers = [_prefilled(cpu, ids) for ids in prompts]
    steps, graphs = _paged(there, prompts, buffers, captures=captures)
    expected = [_greedy(cpu, ids, buffer, NUM_STEPS) for ids, buffer in zip(prompts, buffers, strict=True)]
    found = [list[int]() for _ in prompts]
    for num_rows, num_steps in ((3, NUM_STEPS // 2), (2, NUM_STEPS - NUM_STEPS // 2)):
        steps.starts_E.copy_(torch.arange(max(SIZES) + 1).clamp(max=num_rows))
        for _ in range(num_steps):
            logits_BV = graphs.run(num_rows)
            assert len(logits_BV) == graphs.size_for(num_rows)
            for row, token in enumerate(steps.token_ids_B.tolist()[:num_rows]):
                found[row].append(token)
    assert found[:2] == expected[:2]
    assert found[2] == expected[2][: NUM_STEPS // 2]
    lengths = [len(ids) + NUM_STEPS for ids in prompts]
    assert steps.lengths_B.tolist() == [lengths[0], lengths[1], len(prompts[2]) + NUM_STEPS // 2, 0]


def _paged(
    decoder: Decoder, prompts: Sequence[Sequence[int]], buffers: Sequence[KvBuffer], *, captures: bool
) -> tuple[PagedSteps, StepGraphs]:
    """Steps of rows with these prompts, whose KV lies in pages in no order; whatever was not written is NaN."""
    layout, where = decoder.layout, decoder.device.torch_device
    row_pages = -(-(max(LENGTHS) + NUM_STEPS) // PAGE_TOKENS)
    shape = (layout.num_layers, max(SIZES) * row_pages, PAGE_TOKENS, 2, layout.num_kv_heads, layout.head_dim)
    pages_LPS2GH = torch.full(shape, torch.nan, device=where)
    order = torch.randperm(shape[1], generator=torch.Generator().manual_seed(3)).int()
    steps = PagedSteps(decoder, pages_LPS2GH, order.view(max(SIZES), row_pages).to(where))
    graphs = StepGraphs(steps, SIZES, captures=captures)
    for size in SIZES:
        graphs.run(size)  # of padding alone, as in a capture
    assert bool(pages_LPS2GH.isnan().all()), "padding wrote KV"
    assert not steps.token_ids_B.any() and not steps.lengths_B.any()
    for row, (ids, buffer) in enumerate(zip(prompts, buffers, strict=True)):
        for at in range(len(ids) - 1):
            page = int(steps.table_BC[row, at // PAGE_TOKENS])
            pages_LPS2GH[:, page, at % PAGE_TOKENS] = buffer.data[:, at].to(where)
        steps.token_ids_B[row], steps.lengths_B[row] = ids[-1], len(ids)
    return steps, graphs


@torch.inference_mode()
def _prefilled(decoder: Decoder, ids: Sequence[int]) -> KvBuffer:
    """KV of all tokens but the last, with room for what follows."""
    buffer = KvBuffer(decoder.layout, TokenRange(0, len(ids) + NUM_STEPS))
    if len(ids) > 1:
        decoder.forward(ids[:-1], [BufferSpan(buffer, TokenRange(0, len(ids) - 1))])
    return buffer


@torch.inference_mode()
def _greedy(decoder: Decoder, ids: Sequence[int], buffer: KvBuffer, num_tokens: int) -> list[int]:
    token, found = ids[-1], list[int]()
    for at in range(len(ids) - 1, len(ids) - 1 + num_tokens):
        hidden_TD = decoder.forward([token], [BufferSpan(buffer, TokenRange(at, at + 1))])
        token = int(decoder.logits(hidden_TD).argmax())
        found.append(token)
    return found
