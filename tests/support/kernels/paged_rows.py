"""Copies of KV buffers in pages that are stored in random order."""

import random
from collections.abc import Sequence

from baton.modeling.kv.buffers import KvBuffer
from baton.modeling.kv.pages import PagePool, RowPages
from baton.modeling.kv.pool_memory import MappedPool
from baton.types import TokenRange


def scattered_pool(buffers: Sequence[KvBuffer], page_tokens: int, seed: int) -> PagePool:
    """Return a page pool with room for copies of all buffers. Half of its pages, chosen at random, are in use by
    others."""
    num_pages = 2 * sum(-(-len(each.tokens) // page_tokens) for each in buffers)
    pool = PagePool(MappedPool(buffers[0].layout, num_pages, page_tokens))
    order = random.Random(seed).sample(range(num_pages), num_pages // 2)
    pool.take(num_pages)
    pool.give(order)
    return pool


def in_pages(buffers: Sequence[KvBuffer], page_tokens: int, seed: int = 1) -> list[RowPages]:
    """Return paged copies of the buffers. Their pages are allocated alternately: the first page of each, then the
    second page of each, and so on."""
    pool = scattered_pool(buffers, page_tokens, seed)
    rows = [RowPages(pool, len(each.tokens)) for each in buffers]
    for start in range(0, max(len(each.tokens) for each in buffers), page_tokens):
        for row, buffer in zip(rows, buffers, strict=True):
            if start < len(buffer.tokens):
                row.prepare(TokenRange(start, min(start + page_tokens, len(buffer.tokens))), 0)
    for row, buffer in zip(rows, buffers, strict=True):
        for layer in range(buffer.layout.num_layers):
            for part, kv_T2GH in row.spans(layer, buffer.tokens):
                kv_T2GH.copy_(buffer.span(layer, part))
    return rows
