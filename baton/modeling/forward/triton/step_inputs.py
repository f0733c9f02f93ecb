"""Inputs of the steps that run entirely on a device (`step_graphs`), in memory whose addresses do not change. A CUDA
graph reads this memory at each replay. The host writes all inputs of a step to one piece of its memory, which is copied
to the device at once.

Shape letters: T tokens, R results, B sequences with few new tokens, M sequences with many, E = B + 1, F = M + 1, S
tokens of a page, C pages of a sequence, X blocks of queries.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from baton.modeling.forward.drawing import Draws, RowDraw
from baton.modeling.forward.triton.triton_rows import RowArrays, TableArrays
from baton.modeling.kernels.triton.row_kernels import StepRows
from baton.modeling.kernels.triton.spans import SpanRows
from baton.modeling.kernels.triton.tiles import PrefillTiles, alike


@dataclass(frozen=True)
class StepTokens:
    """New tokens of a step, and what they result in. All KV is in one pool of pages."""

    token_ids: Sequence[int]
    """New tokens of all sequences, concatenated."""
    sources: Sequence[int]
    """Place of each new token that the host has not read, among the tokens that earlier steps draw
    (`PendingTokens.first`). -1: the host knows the token."""
    positions: Sequence[int]
    """Position of each token in its sequence."""
    results: Sequence[int]
    """Indices of the tokens whose logits are needed. An index may occur several times."""
    draws: Sequence[RowDraw] | None
    """Parameters for drawing the token that follows each result. None: the host draws the tokens."""


@dataclass(frozen=True)
class StepShape:
    """Sizes of the largest step that one graph serves."""

    num_tokens: int
    num_results: int
    """Maximum number of tokens whose logits are needed. If it equals `num_tokens`, the step computes the logits of all
    its tokens."""
    num_rows: int
    """Maximum number of sequences with few new tokens (`MOST_QUERIES`)."""
    most_queries: int
    """Maximum number of new tokens of each of these sequences."""
    num_few_tokens: int
    """Maximum number of new tokens of all of these sequences."""
    num_spans: int = 0
    """Maximum number of sequences with many new tokens, and one more, which stays empty. 0: no such sequences."""
    num_blocks: int = 0
    """Maximum number of blocks of queries of the sequences with many new tokens."""

    @property
    def selects(self) -> bool:
        """True if the step computes the logits of some of its tokens only."""
        return self.num_results < self.num_tokens

    def fits(self, tokens: StepTokens, rows: RowArrays) -> bool:
        """Return True if a graph of this shape serves a step."""
        num_few, num_many = len(rows.few.lengths_B), len(rows.many.lengths_B)
        return (
            len(tokens.token_ids) <= self.num_tokens
            and len(tokens.results) <= self.num_results
            and num_few <= self.num_rows
            and int(rows.few.starts_E[-1]) <= self.num_few_tokens
            and int(np.diff(rows.few.starts_E).max(initial=0)) <= self.most_queries
            and (not num_many or num_many < self.num_spans)
            and len(rows.blocks_X2) <= self.num_blocks
        )


class StepTable(NamedTuple):
    """Block tables and lengths of some sequences, as in `StepRows`, int32."""

    table_BC: Tensor
    """A multiple of 16 entries for each sequence."""
    lengths_B: Tensor
    starts_E: Tensor
    firsts_B: Tensor

    def write(self, arrays: TableArrays) -> None:
        """Write the sequences in `arrays`. The entries after them describe sequences without new tokens. A kernel may
        still load their first page, so it must exist."""
        num_rows, num_pages = arrays.table_BC.shape
        self.table_BC.numpy()[:num_rows, :num_pages] = arrays.table_BC
        self.table_BC.numpy()[num_rows:, 0] = 0
        for to_B, new_B, padding in (
            (self.lengths_B, arrays.lengths_B, 0),
            (self.starts_E, arrays.starts_E, arrays.starts_E[-1]),
            (self.firsts_B, arrays.firsts_B, 0),
        ):
            _write(to_B, new_B, padding)

    def rows(self, most_queries: int, most_keys: int, num_tokens: int) -> StepRows:
        """Return the sequences as a kernel argument."""
        return StepRows(*self[:3], most_queries, most_keys, self.firsts_B, num_tokens=num_tokens)


class StepInputs(NamedTuple):
    """Inputs of a step. All fields are views of one piece of memory. A tensor may have more entries than the step
    needs. The entries after them are padding. Integers are int64 unless stated otherwise."""

    few: StepTable
    many: StepTable
    key_R: Tensor
    top_k_R: Tensor
    floor_R: Tensor
    top_p_R: Tensor
    token_ids_T: Tensor
    sources_T: Tensor
    """For each token, its place among the tokens that earlier steps draw; -1: the token is in `token_ids_T`."""
    positions_T: Tensor
    results_R: Tensor
    temperature_R: Tensor
    slots_T: Tensor
    """Index of each token's key among the tokens of all pages, int32 (`append_kv`). -1: padding."""
    blocks_X2: Tensor
    """Blocks of queries, int32 (`SpanRows`). Padding is in the last sequence with many new tokens, which is empty."""

    @classmethod
    def over(cls, memory: Tensor, shape: StepShape, row_pages: int) -> Self:
        """Return StepInputs for steps of `shape`, whose sequences have at most `row_pages` pages. The fields are views
        of the first bytes of `memory`. It must have `input_bytes(shape, row_pages)` bytes, all of them 0."""
        views, start = list[Tensor](), 0
        for dtype, sizes in _fields(shape, row_pages):
            num_bytes = dtype.itemsize * math.prod(sizes)
            views.append(memory[start : start + num_bytes].view(dtype).view(sizes))
            start += alike(num_bytes)
        return cls(StepTable(*views[11:15]), StepTable(*views[15:]), *views[:11])

    @property
    def draws(self) -> Draws:
        """Return the drawing parameters of the results."""
        return Draws(self.key_R, self.top_k_R, self.floor_R, self.top_p_R, self.temperature_R)

    def write(self, tokens: StepTokens, rows: RowArrays) -> None:
        """Write the inputs of a step, which must fit."""
        columns: list[tuple[Tensor, Sequence[float], int]] = [
            (self.token_ids_T, tokens.token_ids, 0),
            (self.sources_T, tokens.sources, -1),
            (self.positions_T, tokens.positions, 0),
            (self.results_R, tokens.results, 0),
        ]
        if tokens.draws:
            numbers = zip(*tokens.draws, strict=True)
            columns += [(to_R, draw, 0) for to_R, draw in zip(self.draws, numbers, strict=False)]
        for to_X, new, padding in columns:
            _write(to_X, np.array(new, to_X.numpy().dtype), padding)
        _write(self.slots_T, rows.slots_U, -1)
        self.few.write(rows.few)
        self.many.write(rows.many)
        blocks_X2 = self.blocks_X2.numpy()
        blocks_X2[: len(rows.blocks_X2)] = rows.blocks_X2
        blocks_X2[len(rows.blocks_X2) :] = len(self.many.lengths_B) - 1, 0

    def few_rows(self, shape: StepShape, most_keys: int) -> StepRows:
        """Return the sequences with few new tokens as a kernel argument."""
        return self.few.rows(shape.most_queries, most_keys, shape.num_few_tokens)

    def many_rows(self, shape: StepShape, most_keys: int, tiles: PrefillTiles) -> SpanRows | None:
        """Return the sequences with many new tokens as a kernel argument. None: the shape has none."""
        if not shape.num_spans:
            return None
        return SpanRows(self.many.rows(shape.num_tokens, most_keys, shape.num_tokens), self.blocks_X2, tiles)


def input_bytes(shape: StepShape, row_pages: int) -> int:
    """Return the number of bytes of the inputs of steps of a shape, whose sequences have at most `row_pages` pages."""
    return sum(alike(dtype.itemsize * math.prod(sizes)) for dtype, sizes in _fields(shape, row_pages))


def _fields(shape: StepShape, row_pages: int) -> Iterator[tuple[torch.dtype, tuple[int, ...]]]:
    """Yield the dtype and shape of each field of StepInputs. Each field begins at a multiple of 16 bytes."""
    results, tokens = (shape.num_results,), (shape.num_tokens,)
    yield from ((torch.int64, results), (torch.int64, results), (torch.float64, results), (torch.float64, results))
    yield from ((torch.int64, tokens), (torch.int64, tokens), (torch.int64, tokens), (torch.int64, results))
    yield from ((torch.float32, results), (torch.int32, tokens), (torch.int32, (shape.num_blocks, 2)))
    for num_rows in (shape.num_rows, shape.num_spans):
        yield torch.int32, (num_rows, alike(row_pages))
        yield from ((torch.int32, (each,)) for each in (num_rows, num_rows + 1, num_rows))


def _write(to_X: Tensor, new_X: np.ndarray, padding: int) -> None:
    to = to_X.numpy()
    to[: len(new_X)] = new_X
    to[len(new_X) :] = padding
