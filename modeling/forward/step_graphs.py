"""Generation steps that run whole on a device: KV in pages, the next tokens drawn there, nothing read by the host.

`StepGraphs` serves the steps of `generate_workers.engine.step_runner` whose rows all decode one token. What a step
reads is written by the host before it, in one copy; the tokens are read back once, behind it. A step is captured for
each of some numbers of rows, and for each kind of drawing, in a CUDA graph: a replay launches hundreds of kernels at
once. Kernels are those of `modeling.kernels.triton` and, for drawing, torch's (`drawing`). Without captures the same
steps are launched kernel by kernel, as in Triton's interpreter.

B rows, E = B + 1, L layers, P pages, S tokens of a page, C pages of a row, V vocabulary, G kv heads, H head dim.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from modeling.forward.decoder import Decoder
from modeling.forward.drawing import DrawKind, Draws, RowDraw, choose_tokens
from modeling.kernels.triton.append import append_kv
from modeling.kernels.triton.decode import SeenKeys, decode_attention
from modeling.kernels.triton.rows import StepRows
from modeling.kv.buffers import BlockTable

_WARM_UPS = 2
"""Steps before a capture: kernels are compiled and libraries take their memory in them, which a capture forbids."""
_LOGIT_BYTES = 100
"""Bytes of the device for each logit of a step that filters: its forms from bf16 to float64, noise, and sorting."""


class DecodeRow(NamedTuple):
    """A row of a step: a sequence whose latest token has no KV yet."""

    token_id: int
    """The latest token of the sequence."""
    table: BlockTable
    """The pages of the row's keys, with room for the latest token's, whose pages are the row's own."""
    num_keys: int
    """Keys of the row, the latest token's included."""
    draw: RowDraw
    """How the next token is drawn."""


class StepInputs(NamedTuple):
    """What a step reads of its rows, in views of one piece of memory. Rows without a new token are padding, and come
    behind all others."""

    key_B: Tensor
    top_k_B: Tensor
    floor_B: Tensor
    top_p_B: Tensor
    token_ids_B: Tensor
    """The rows' latest tokens, int64."""
    temperature_B: Tensor
    lengths_B: Tensor
    """Tokens of the rows, the latest ones included, int32."""
    starts_E: Tensor
    """Number of each row's token among the step's, and their sum, int32."""
    table_BC: Tensor
    """Numbers of the rows' pages, int32."""

    @classmethod
    def over(cls, memory: Tensor, num_rows: int, row_pages: int) -> Self:
        """Return the views of a piece of memory of `input_bytes` bytes."""
        views, start = [], 0
        for dtype, shape in _fields(num_rows, row_pages):
            num_bytes = dtype.itemsize * math.prod(shape)
            views.append(memory[start : start + num_bytes].view(dtype).view(shape))
            start += num_bytes
        return cls(*views)

    @property
    def draws(self) -> Draws:
        """Return how the rows draw."""
        return Draws(self.key_B, self.top_k_B, self.floor_B, self.top_p_B, self.temperature_B)

    def write(self, rows: Sequence[DecodeRow], kind: DrawKind) -> None:
        """Write the rows of a step that draws so, and leave all others as padding. Greedy steps read no `draws`."""
        num_rows = len(rows)
        torch.stack([row.table.pages_C for row in rows], out=self.table_BC[:num_rows])
        columns: list[tuple[Tensor, Sequence[float]]] = [
            (self.token_ids_B, [row.token_id for row in rows]),
            (self.lengths_B, [row.num_keys for row in rows]),
        ]
        if kind != DrawKind.GREEDY:
            columns += zip(self.draws, zip(*(row.draw for row in rows), strict=True), strict=True)
        for column_B, column in columns:
            column_B[:num_rows] = torch.tensor(column, dtype=column_B.dtype)
        torch.arange(len(self.starts_E), out=self.starts_E).clamp_(max=num_rows)


def _fields(num_rows: int, row_pages: int) -> list[tuple[torch.dtype, tuple[int, ...]]]:
    """Return dtype and shape of each field of StepInputs, those of 8 bytes first, so that all are aligned."""
    long, double, each = torch.int64, torch.float64, (num_rows,)
    eight = [(long, each), (long, each), (double, each), (double, each), (long, each)]
    four = [(torch.float32, each), (torch.int32, each), (torch.int32, (num_rows + 1,))]
    return [*eight, *four, (torch.int32, (num_rows, row_pages))]


def input_bytes(num_rows: int, row_pages: int) -> int:
    """Return the bytes of what a step of so many rows reads of them."""
    return sum(dtype.itemsize * math.prod(shape) for dtype, shape in _fields(num_rows, row_pages))


def step_bytes(decoder: Decoder, num_rows: int, row_pages: int) -> int:
    """Return the bytes of the device that steps of at most so many rows take beside weights and KV, as far as they can
    be told before any is run: inputs, what sampling needs of each logit, and a layer's activations. All captures share
    them."""
    config = decoder.config
    widest = (
        3 * config.num_active_experts * config.intermediate_size
        + 4 * config.hidden_size
        + 4 * config.num_heads * config.head_dim
    )
    a_row = _LOGIT_BYTES * config.vocab_size + decoder.dtype.itemsize * widest
    return input_bytes(num_rows, row_pages) + num_rows * a_row


class StepGraphs:
    """Steps of rows whose KV lies in pages, for some numbers of rows. Used by one thread at a time."""

    def __init__(
        self, decoder: Decoder, pages_LPS2GH: Tensor, row_pages: int, sizes: Sequence[int], *, captures: bool = True
    ) -> None:
        """Capture steps of `sizes` rows of at most `row_pages` pages, the largest first, for all share its memory.
        Without `captures` steps are launched kernel by kernel. Raises what is in OUT_OF_MEMORY. Blocks."""
        self._decoder, self._pages_LPS2GH = decoder, pages_LPS2GH
        device, most_rows = pages_LPS2GH.device, max(sizes)
        num_bytes = input_bytes(most_rows, row_pages)
        self._home = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._there = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self._written = StepInputs.over(self._home, most_rows, row_pages)
        self._inputs = StepInputs.over(self._there, most_rows, row_pages)
        self._chosen_B = torch.zeros(most_rows, dtype=torch.int64, device=device)
        self._most_keys = row_pages * pages_LPS2GH.shape[2]
        self.sizes = sorted(set(sizes))
        """Numbers of rows for which there are steps."""
        self._run_by_kind = dict[tuple[int, DrawKind], Callable[[], None]]()
        pool = torch.cuda.graph_pool_handle() if captures else None
        for size in reversed(self.sizes):
            for kind in reversed(DrawKind):  # those that filter take the most memory
                run = functools.partial(self._step, self._rows(size), kind)
                self._run_by_kind[size, kind] = _captured(run, device, pool) if captures else run

    def size_for(self, num_rows: int) -> int:
        """Return the least number of rows for which there is a step with room for `num_rows`."""
        return min(size for size in self.sizes if size >= num_rows)

    @torch.inference_mode()
    def run(self, rows: Sequence[DecodeRow]) -> list[int]:
        """Write the KV of the rows' latest tokens to their pages, and return the tokens that follow. There must be a
        step for as many rows. Waits for the device once, for the tokens."""
        kind = max(row.draw.kind(self._decoder.config.vocab_size) for row in rows)
        self._written.write(rows, kind)
        self._there.copy_(self._home, non_blocking=True)  # the host writes it again only behind the step's end
        self._run_by_kind[self.size_for(len(rows)), kind]()
        token_ids: list[int] = self._chosen_B[: len(rows)].tolist()
        return token_ids

    def _rows(self, size: int) -> StepRows:
        """Return the first rows as kernels take them."""
        inputs = self._inputs
        views = inputs.table_BC[:size], inputs.lengths_B[:size], inputs.starts_E[: size + 1]
        return StepRows(*views, most_queries=1, most_keys=self._most_keys)

    @torch.inference_mode()
    def _step(self, rows: StepRows, kind: DrawKind) -> None:
        decoder, weights = self._decoder, self._decoder.weights
        positions = weights.positions.lookup((rows.lengths_B - 1).clamp(min=0).long())
        hidden_BD = decoder.enter(self._inputs.token_ids_B[: rows.num_rows], positions)
        for layer, pages_PS2GH in enumerate(self._pages_LPS2GH):
            q_BNH, k_BGH, v_BGH = decoder.heads(layer, hidden_BD, positions)
            append_kv(k_BGH, v_BGH, pages_PS2GH, rows)
            seen = SeenKeys(decoder.config.windows[layer])
            attended_BNH, _ = decode_attention(q_BNH, pages_PS2GH, rows, seen)
            hidden_BD = decoder.complete(layer, hidden_BD, attended_BNH)
        draws = self._inputs.draws.first(rows.num_rows)
        self._chosen_B[: rows.num_rows] = choose_tokens(decoder.logits(hidden_BD), draws, kind)


def _captured(run: Callable[[], None], device: torch.device, pool: Any) -> Callable[[], None]:
    """Return a function that replays `run` with whatever lies in its tensors."""
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(_WARM_UPS):
            run()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        run()
    return graph.replay
