"""Checks of decode steps over pages by Triton against a decoder on the CPU with contiguous KV.

L layers, P pages, S tokens per page, G KV heads, H head dim, C pages per sequence.
"""

from collections.abc import Sequence
from pathlib import Path

import torch

from baton.modeling.checkpoints.weights import load_decoder
from baton.modeling.device.cpu import CpuDevice
from baton.modeling.device.port import Device
from baton.modeling.forward.attention import plain_kernel
from baton.modeling.forward.decoder import Decoder
from baton.modeling.forward.drawing import NO_TOKEN
from baton.modeling.forward.sampling import SamplerState, sample
from baton.modeling.forward.step_graphs import DecodeRow, StepGraphs
from baton.modeling.kv.buffers import BlockTable, BufferSpan, KvBuffer
from baton.sampling_params import SamplingParams
from baton.types import TokenRange
from tests.support.models.tiny_models import random_decoder

PAGE_TOKENS, NUM_STEPS, SIZES = 8, 10, (2, 4)
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
    table_BC, pages_LPS2GH = _pages(there, prompts, buffers)
    is_unwritten = pages_LPS2GH.isnan()
    graphs = StepGraphs(there, pages_LPS2GH, table_BC.shape[1], SIZES, captures=captures)
    assert torch.equal(pages_LPS2GH.isnan(), is_unwritten), "padding wrote KV"
    expected = [_drawn(cpu, *each) for each in zip(prompts, buffers, PARAMS, strict=True)]
    states = [SamplerState(params, ids) for params, ids in zip(PARAMS, prompts, strict=True)]
    rows: list[DecodeRow] = []
    for num_rows, num_steps in ((3, NUM_STEPS // 2), (2, NUM_STEPS - NUM_STEPS // 2)):
        for _ in range(num_steps):
            rows = []
            for ids, state, pages_C in zip(prompts[:num_rows], states, table_BC, strict=False):
                history, draw = [*ids, *state.output_ids], state.row_draw()
                assert draw is not None
                rows.append(DecodeRow(history[-1], BlockTable(pages_LPS2GH, pages_C), len(history), draw))
            for state, token_id in zip(states, graphs.run(rows), strict=False):
                state.append(token_id)
    assert [state.output_ids for state in states] == [*expected[:2], expected[2][: NUM_STEPS // 2]]
    pages_LPS2GH[-1, table_BC[0].to(pages_LPS2GH.device)] = torch.nan
    assert graphs.run(rows) == [NO_TOKEN, expected[1][-1]], "the last step again, with damaged KV in one row"


def _pages(
    decoder: Decoder, prompts: Sequence[Sequence[int]], buffers: Sequence[KvBuffer]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return block tables `[B, C]` and pages of sequences with the given prompts. Pages are in random order, and
    unwritten KV is NaN."""
    layout, where = decoder.layout, decoder.device.torch_device
    row_pages = -(-(max(LENGTHS) + NUM_STEPS) // PAGE_TOKENS)
    shape = (layout.num_layers, len(prompts) * row_pages, PAGE_TOKENS, 2, layout.num_kv_heads, layout.head_dim)
    pages_LPS2GH = torch.full(shape, torch.nan, device=where)
    order = torch.randperm(shape[1], generator=torch.Generator().manual_seed(3)).int()
    table_BC = order.view(len(prompts), row_pages)
    for row, (ids, buffer) in enumerate(zip(prompts, buffers, strict=True)):
        for at in range(len(ids) - 1):
            page = int(table_BC[row, at // PAGE_TOKENS])
            pages_LPS2GH[:, page, at % PAGE_TOKENS] = buffer.data[:, at].to(where)
    return table_BC, pages_LPS2GH


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
