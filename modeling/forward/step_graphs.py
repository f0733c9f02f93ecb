"""Generation steps that run whole on a device: KV in pages, the next tokens chosen there, nothing read by the host.

`PagedSteps` holds the tensors that a step reads and writes. `StepGraphs` captures a step for each of some numbers of
rows in a CUDA graph, and replays the smallest that has room: a replay launches hundreds of kernels at once. Kernels are
those of `modeling.kernels.triton`. No capture was run on a GPU yet, and no engine uses one: `benchmarks.cuda` measures
graphs, and tests/cuda compares their tokens with the CPU's.

B rows, E = B + 1, L layers, P pages, S tokens of a page, C pages of a row, V vocabulary, G kv heads, H head dim.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from modeling.forward.decoder import Decoder
from modeling.kernels.triton.append import append_kv
from modeling.kernels.triton.decode import SeenKeys, decode_attention
from modeling.kernels.triton.rows import StepRows

_WARM_UPS = 2
"""Steps before a capture: kernels are compiled and libraries take their memory in them, which a capture forbids."""


class PagedSteps:
    """Greedy steps of rows whose KV lies in pages. Their owner writes the tensors between steps, in place. Rows that
    have no new token, by `starts_E`, are padding, and come behind all others: their tokens and lengths stay. No row may
    become longer than its table. Used by one thread."""

    def __init__(self, decoder: Decoder, pages_LPS2GH: Tensor, table_BC: Tensor) -> None:
        """`table_BC`: memory for the numbers of each row's pages, int32; all tensors on the decoder's device."""
        self._decoder, self._pages_LPS2GH = decoder, pages_LPS2GH
        num_rows, where = len(table_BC), table_BC.device
        self.table_BC = table_BC
        self.token_ids_B = torch.zeros(num_rows, dtype=torch.int64, device=where)
        """The rows' latest tokens, whose KV is not in the pages yet; each step writes the next ones."""
        self.lengths_B = torch.zeros(num_rows, dtype=torch.int32, device=where)
        """Tokens of the rows, the latest ones included; each step adds one."""
        self.starts_E = torch.zeros(num_rows + 1, dtype=torch.int32, device=where)
        """Number of each row's token among the tokens that a step computes, and their sum; at first all are padding."""
        self.most_keys = table_BC.shape[1] * pages_LPS2GH.shape[2]

    def first(self, num_rows: int) -> Callable[[], Tensor]:
        """Return a step of the first rows alone. It returns their logits `[B, V]` in fp32, which hold until the next
        step; those of padding mean nothing."""
        views = self.table_BC[:num_rows], self.lengths_B[:num_rows], self.starts_E[: num_rows + 1]
        rows = StepRows(*views, most_queries=1, most_keys=self.most_keys)
        return functools.partial(self._step, rows)

    @torch.inference_mode()
    def _step(self, rows: StepRows) -> Tensor:
        decoder, weights = self._decoder, self._decoder.weights
        token_ids_B = self.token_ids_B[: rows.num_rows]
        positions = weights.positions.lookup((rows.lengths_B - 1).clamp(min=0).long())
        hidden_BD = weights.embedding.rows(token_ids_B)
        positions.enter(hidden_BD)
        for layer, pages_PS2GH in enumerate(self._pages_LPS2GH):
            q_BNH, k_BGH, v_BGH = decoder.heads(layer, hidden_BD, positions)
            append_kv(k_BGH, v_BGH, pages_PS2GH, rows)
            seen = SeenKeys(decoder.config.windows[layer])
            attended_BNH, _ = decode_attention(q_BNH, pages_PS2GH, rows, seen)
            hidden_BD = decoder.complete(layer, hidden_BD, attended_BNH)
        logits_BV = decoder.logits(hidden_BD)
        num_new_B = rows.starts_E.diff()
        token_ids_B.copy_(torch.where(num_new_B > 0, logits_BV.argmax(-1), token_ids_B))
        rows.lengths_B.add_(num_new_B)
        return logits_BV


class StepGraphs:
    """Steps for some numbers of rows, each captured in a CUDA graph. Used by one thread."""

    def __init__(self, steps: PagedSteps, sizes: Sequence[int], *, captures: bool = True) -> None:
        """Capture a step of each of `sizes`, the largest first, for all share its memory. No row of `steps` may have a
        new token yet. Without `captures` steps are launched kernel by kernel, as on a CPU."""
        assert sizes and max(sizes) <= len(steps.table_BC), f"{list(sizes)} of {len(steps.table_BC)} rows"
        device, self._run_by_size = steps.table_BC.device, dict[int, Callable[[], Tensor]]()
        pool = torch.cuda.graph_pool_handle() if captures else None
        for size in sorted(sizes, reverse=True):
            run = steps.first(size)
            self._run_by_size[size] = _captured(run, device, pool) if captures else run

    def size_for(self, num_rows: int) -> int:
        """Return the least number of rows for which there is a step with room for `num_rows`."""
        return min(size for size in self._run_by_size if size >= num_rows)

    def run(self, num_rows: int) -> Tensor:
        """Run a step of the first rows, at least `num_rows` of them; the others of these must be padding. Return logits
        as `PagedSteps.first` does."""
        return self._run_by_size[self.size_for(num_rows)]()


def _captured(run: Callable[[], Tensor], device: torch.device, pool: Any) -> Callable[[], Tensor]:
    """Return a function that replays `run` with whatever lies in its tensors, and returns the same tensor each time."""
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(_WARM_UPS):
            run()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        logits_BV = run()

    def replay() -> Tensor:
        graph.replay()
        return logits_BV

    return replay
