"""Generation steps that run entirely on a device. KV is in pages, and tokens are drawn on the device without the host.

`StepGraphs` serves those steps of `generate_workers.engine.model_runner` in which all sequences decode one token. The
host writes the inputs in one copy before the step, and reads the tokens once after it. It may launch the next step
before it has read the tokens of this one, because a step finds the tokens of the step before it on the device.

A step is captured in a CUDA graph for each of several batch sizes and for each kind of drawing. Replaying a graph
launches hundreds of kernels at once. The kernels are those of `baton.modeling.kernels.triton` and, for drawing, those
of torch (`drawing`). Without capturing, for example in Triton's interpreter, the same steps are launched kernel by
kernel.

Shape letters: B sequences, E = B + 1, L layers, P pages, S tokens of a page, C pages of a sequence, V vocabulary size,
G kv heads, H head dim.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from baton.modeling.forward.decoder import Decoder
from baton.modeling.forward.drawing import DrawKind, Draws, RowDraw, choose_tokens
from baton.modeling.kernels.triton.append import append_kv
from baton.modeling.kernels.triton.decode import SeenKeys, decode_attention
from baton.modeling.kernels.triton.row_kernels import StepRows
from baton.modeling.kernels.triton.tiles import alike
from baton.modeling.kv.buffers import BlockTable

_WARM_UPS = 2
"""Number of warm-up steps before a capture. In these steps kernels are compiled and libraries allocate memory, which is
not allowed during a capture."""
_IN_FLIGHT = 2
"""Maximum number of launched steps whose tokens the host has not read."""
_LOGIT_BYTES = 100
"""Estimated number of device bytes per logit in a step with filters: copies of the logits from bf16 to float64, noise,
and sorting."""


class DecodeRow(NamedTuple):
    """One sequence of a step. The KV of its latest token has not been computed yet."""

    token_id: int
    """Latest token of the sequence. Ignored if `source` is not -1."""
    table: BlockTable
    """Block table of the sequence. It must include a page for the latest token's key. This page must not have another
    owner, such as another sequence."""
    num_keys: int
    """Number of keys of the sequence, including the key of the latest token."""
    draw: RowDraw
    """Parameters for drawing the sequence's next token."""
    source: int = -1
    """Index of the sequence among those of the step before, if that step draws the latest token and the host has not
    read it yet. -1: the host knows the latest token."""


class PendingTokens:
    """Tokens that a launched step draws."""

    def __init__(self, token_ids_B: Tensor, wait: Callable[[], None]) -> None:
        """`token_ids_B`: host memory to which the step copies its tokens, int64. `wait`: waits until it is done."""
        self._token_ids_B = token_ids_B
        self._wait = wait

    def result(self) -> list[int]:
        """Wait for the step, and return the next token of each of its sequences. Must be called before the second step
        after this one is launched, because that step uses the same memory."""
        self._wait()
        token_ids: list[int] = self._token_ids_B.tolist()
        return token_ids


class StepInputs(NamedTuple):
    """Inputs of a step. All fields are views of one piece of memory. A tensor may have more entries than the step
    has sequences. The entries after the last sequence are padding: they describe sequences without a new token."""

    key_B: Tensor
    top_k_B: Tensor
    floor_B: Tensor
    top_p_B: Tensor
    token_ids_B: Tensor
    """Latest token of each sequence, int64."""
    sources_B: Tensor
    """Index of each sequence among those of the step before, whose token is then its latest token, int64. -1: the
    latest token is in `token_ids_B`."""
    temperature_B: Tensor
    lengths_B: Tensor
    """Number of tokens of each sequence, including the latest one, int32."""
    slots_B: Tensor
    """Index of the key of each sequence's latest token among the tokens of all pages, int32 (`append_kv`). -1:
    padding."""
    starts_E: Tensor
    """Index of each sequence's new token among the tokens of the step, int32. The last entry is the total number of
    tokens."""
    table_BC: Tensor
    """Block table of each sequence: the indices of its pages, int32. A multiple of 16 entries."""

    @classmethod
    def over(cls, memory: Tensor, num_rows: int, row_pages: int) -> Self:
        """Return StepInputs whose fields are views of `memory`. The memory must have `input_bytes(num_rows, row_pages)`
        bytes."""
        views, start = [], 0
        for dtype, shape in _fields(num_rows, row_pages):
            num_bytes = dtype.itemsize * math.prod(shape)
            views.append(memory[start : start + num_bytes].view(dtype).view(shape))
            start += alike(num_bytes)
        return cls(*views)

    @property
    def draws(self) -> Draws:
        """Return the drawing parameters of the sequences."""
        return Draws(self.key_B, self.top_k_B, self.floor_B, self.top_p_B, self.temperature_B)

    def write(self, rows: Sequence[DecodeRow], kind: DrawKind) -> None:
        """Write the inputs of a step for these sequences. Entries after the last sequence become padding. If `kind` is
        greedy, the drawing parameters are not written, because greedy steps do not read them."""
        num_rows = len(rows)
        table_BC, page_tokens = torch.stack([row.table.pages_C for row in rows]), rows[0].table.page_tokens
        self.table_BC[:num_rows, : table_BC.shape[1]] = table_BC
        keys_B = torch.tensor([row.num_keys - 1 for row in rows])
        pages_B = table_BC[torch.arange(num_rows), keys_B // page_tokens]
        self.slots_B.fill_(-1)[:num_rows] = pages_B * page_tokens + keys_B % page_tokens
        columns: list[tuple[Tensor, Sequence[float]]] = [
            (self.token_ids_B, [row.token_id for row in rows]),
            (self.sources_B, [row.source for row in rows]),
            (self.lengths_B, [row.num_keys for row in rows]),
        ]
        if kind != DrawKind.GREEDY:
            columns += zip(self.draws, zip(*(row.draw for row in rows), strict=True), strict=True)
        for column_B, column in columns:
            column_B[:num_rows] = torch.tensor(column, dtype=column_B.dtype)
        torch.arange(len(self.starts_E), out=self.starts_E).clamp_(max=num_rows)


def _fields(num_rows: int, row_pages: int) -> list[tuple[torch.dtype, tuple[int, ...]]]:
    """Return the dtype and shape of each field of StepInputs. Each field begins at a multiple of 16 bytes."""
    long, double, each = torch.int64, torch.float64, (num_rows,)
    eight = [(long, each), (long, each), (double, each), (double, each), (long, each), (long, each)]
    four = [(torch.float32, each), (torch.int32, each), (torch.int32, each), (torch.int32, (num_rows + 1,))]
    return [*eight, *four, (torch.int32, (num_rows, alike(row_pages)))]


def input_bytes(num_rows: int, row_pages: int) -> int:
    """Return the number of bytes of the inputs of a step with `num_rows` sequences of at most `row_pages` pages
    each."""
    return sum(alike(dtype.itemsize * math.prod(shape)) for dtype, shape in _fields(num_rows, row_pages))


def step_bytes(decoder: Decoder, num_rows: int, row_pages: int) -> int:
    """Return an estimate of the device memory in bytes that steps of at most `num_rows` sequences need, in addition to
    weights and KV. The estimate includes the inputs, the memory of sampling and the activations of a layer. All
    captured steps share this memory."""
    config = decoder.config
    widest = (
        3 * config.num_active_experts * config.intermediate_size
        + 4 * config.hidden_size
        + 4 * config.num_heads * config.head_dim
    )
    a_row = _LOGIT_BYTES * config.vocab_size + decoder.dtype.itemsize * widest
    return input_bytes(num_rows, row_pages) + num_rows * a_row


class StepGraphs:
    """Generation steps for several batch sizes, captured in CUDA graphs. The KV of all sequences must be in pages. Used
    by one thread at a time."""

    def __init__(
        self, decoder: Decoder, pages_LPS2GH: Tensor, row_pages: int, sizes: Sequence[int], *, captures: bool = True
    ) -> None:
        """Capture a step in a CUDA graph for each batch size in `sizes` and each kind of drawing. Each sequence has at
        most `row_pages` pages. The largest step is captured first, because all graphs share its memory.

        If `captures` is False, nothing is captured, and steps are launched kernel by kernel. If there is too little
        memory, raises one of the errors in OUT_OF_MEMORY. Blocks.
        """
        self._decoder, self._pages_LPS2GH = decoder, pages_LPS2GH
        self.captures = captures
        """True if steps replay CUDA graphs, and False if their kernels are launched one by one."""
        device, most_rows = pages_LPS2GH.device, max(sizes)
        num_bytes = input_bytes(most_rows, row_pages)
        is_cuda = device.type == "cuda"
        self._homes = [torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=is_cuda) for _ in range(_IN_FLIGHT)]
        """Inputs in host memory. Steps use them in rotation, because the device may not have copied those of the step
        before when the host writes the next ones."""
        self._written = [StepInputs.over(home, most_rows, row_pages) for home in self._homes]
        self._results = [torch.zeros(most_rows, dtype=torch.int64, pin_memory=is_cuda) for _ in range(_IN_FLIGHT)]
        self._num_launched = 0
        self._there = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self._inputs = StepInputs.over(self._there, most_rows, row_pages)
        self._inputs.slots_B.fill_(-1)  # the steps before a capture write no keys
        self._chosen_B = torch.zeros(most_rows, dtype=torch.int64, device=device)
        self._most_keys = row_pages * pages_LPS2GH.shape[2]
        self.sizes = sorted(set(sizes))
        """Batch sizes for which steps exist, in ascending order."""
        self._run_by_kind = dict[tuple[int, DrawKind], Callable[[], None]]()
        pool = torch.cuda.graph_pool_handle() if captures else None
        for size in reversed(self.sizes):
            for kind in reversed(DrawKind):  # steps with filters take the most memory
                run = functools.partial(self._step, self._rows(size), kind)
                self._run_by_kind[size, kind] = _captured(run, device, pool) if captures else run

    def size_for(self, num_rows: int) -> int:
        """Return the smallest entry of `sizes` that is at least `num_rows`, the number of sequences."""
        return min(size for size in self.sizes if size >= num_rows)

    @torch.inference_mode()
    def launch(self, rows: Sequence[DecodeRow]) -> PendingTokens:
        """Launch one step, and return its tokens, which may not be drawn yet. The step writes the KV of each sequence's
        latest token to the pages of the sequence. There must be at most as many sequences as the largest entry of
        `sizes`. Only the step before may still be unread. On a CPU, the step has ended when the method returns."""
        kind = max(row.draw.kind(self._decoder.config.vocab_size) for row in rows)
        turn, self._num_launched = self._num_launched % _IN_FLIGHT, self._num_launched + 1
        self._written[turn].write(rows, kind)
        token_ids_B = self._results[turn][: len(rows)]

        def work() -> None:
            self._there.copy_(self._homes[turn], non_blocking=True)
            self._run_by_kind[self.size_for(len(rows)), kind]()
            token_ids_B.copy_(self._chosen_B[: len(rows)], non_blocking=True)

        return PendingTokens(token_ids_B, self._queue(work))

    def _queue(self, work: Callable[[], None]) -> Callable[[], None]:
        """Queue work on the device, and return a function that waits until it is done."""
        work()
        if not self._there.is_cuda:
            return lambda: None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event.synchronize

    def _rows(self, size: int) -> StepRows:
        """Return the first `size` sequences in the form that kernels take as arguments."""
        inputs = self._inputs
        views = inputs.table_BC[:size], inputs.lengths_B[:size], inputs.starts_E[: size + 1]
        return StepRows(*views, most_queries=1, most_keys=self._most_keys)

    @torch.inference_mode()
    def _step(self, rows: StepRows, kind: DrawKind) -> None:
        decoder, weights = self._decoder, self._decoder.weights
        positions = weights.positions.lookup((rows.lengths_B - 1).clamp(min=0).long())
        hidden_BD = decoder.enter(self._token_ids(rows.num_rows), positions)
        for layer, pages_PS2GH in enumerate(self._pages_LPS2GH):
            q_BNH, k_BGH, v_BGH = decoder.heads(layer, hidden_BD, positions)
            append_kv(k_BGH, v_BGH, pages_PS2GH, self._inputs.slots_B[: rows.num_rows])
            seen = SeenKeys(decoder.config.windows[layer])
            attended_BNH = decode_attention(q_BNH, pages_PS2GH, rows, seen)
            hidden_BD = decoder.complete(layer, hidden_BD, attended_BNH)
        draws = self._inputs.draws.first(rows.num_rows)
        self._chosen_B[: rows.num_rows] = choose_tokens(decoder.logits(hidden_BD), draws, kind)

    def _token_ids(self, num_rows: int) -> Tensor:
        """Return the latest token of each sequence. A sequence whose logits were not finite has no token, and gets
        token 0: the host ends it."""
        known_B, sources_B = self._inputs.token_ids_B[:num_rows], self._inputs.sources_B[:num_rows]
        drawn_B = self._chosen_B[sources_B.clamp(min=0)].clamp(min=0)
        return torch.where(sources_B < 0, known_B, drawn_B)


def _captured(run: Callable[[], None], device: torch.device, pool: Any) -> Callable[[], None]:
    """Return a function that replays `run` with the current contents of its tensors."""
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
