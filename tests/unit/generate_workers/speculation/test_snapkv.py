"""SnapKV's keys are those of a reference in float64, follow the row as it grows, and cost the row nothing."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from baton.modeling.forward.decoder import Decoder
from baton.modeling.kv.buffers import BufferSpan, KvBuffer
from baton.planning.speculation import MOST_DRAFTS
from baton.types import TokenRange
from generate_workers.engine.rows import Row
from generate_workers.residency.port import DraftKeys
from generate_workers.speculation.port import DraftRequest
from generate_workers.speculation.self_drafts import SelfProposer
from generate_workers.speculation.snapkv import SnapKvView
from tests.support.engines.draft_views import DECODER, decoding, lists_of, residency_of
from tests.support.engines.generation import Harness, prompt
from tests.support.kernels.paths import needs_rows
from tests.support.models.tiny_models import random_decoder

pytestmark = needs_rows
MQA = random_decoder(num_layers=2, num_heads=3, num_kv_heads=1, seed=5)

Scores = NDArray[np.float64]


@torch.inference_mode()
def queries_and_keys(decoder: Decoder, ids: Sequence[int]) -> list[tuple[Scores, Scores]]:
    """Queries `[T, N, H]` and keys `[T, G, H]` of each layer, by one forward over all tokens."""
    tokens = TokenRange(0, len(ids))
    buffer = KvBuffer(decoder.layout, tokens)
    step = decoder.begin([BufferSpan(buffer, tokens)])
    hidden_TD, found = decoder.embed(ids, step), []
    for layer in range(decoder.config.num_layers):
        q_TNH = decoder.project(layer, hidden_TD, step)
        rows = buffer.rows(layer, tokens)
        found.append((q_TNH.double().numpy(), rows.k_SGH.double().numpy()))
        attention = decoder.attention(layer, q_TNH, 0)
        attention.add(rows)
        hidden_TD = decoder.complete(layer, hidden_TD, attention.result())
    return found


def reference(q_TNH: Scores, k_TGH: Scores, window: int) -> Scores:
    """The pooled scores of the keys before the window, `[G, S]`: query by query, key by key."""
    num_tokens, num_heads, head_dim = q_TNH.shape
    num_kv_heads, start = k_TGH.shape[1], num_tokens - window
    pooled_GS = np.zeros((num_kv_heads, start))
    for head in range(num_heads):
        group, attended_S = head // (num_heads // num_kv_heads), np.zeros(start)
        for at in range(start, num_tokens):
            products = k_TGH[: at + 1, group] @ q_TNH[at, head] / np.sqrt(head_dim)
            weights = np.exp(products - products.max())
            attended_S += weights[:start] / weights.sum()
        for key in range(start):
            pooled_GS[group, key] += attended_S[max(key - 2, 0) : key + 3].sum() / 5
    return pooled_GS


def selected(view: SnapKvView, made: Harness, rows: Sequence[Row]) -> list[list[list[list[int]]]]:
    """The keys that the first draft step of a round attends to: by layer, row and kv head."""
    with torch.inference_mode():
        view.begin(rows)
        with view.step([(row.slot, TokenRange(row.num_known - 1, row.num_known)) for row in rows]) as step:
            assert step.picks is not None
            assert step.picks.keys_LBGK.is_contiguous()
            assert step.picks.num_BG.is_contiguous()
            return [lists_of(step.picks.of_layer(layer)) for layer in range(made.decoder.config.num_layers)]


def make(made: Harness, num_keys: int) -> SnapKvView:
    return SnapKvView(made.decoder, residency_of(made), DraftKeys.of(num_keys, MOST_DRAFTS))


@pytest.mark.parametrize("decoder", [DECODER, MQA], ids=["grouped", "one_kv_head"])
@pytest.mark.parametrize(("num_keys", "window"), [(24, 12), (72, 32), (3, 1)])
def test_keys_are_those_of_a_reference_in_float64(decoder: Decoder, num_keys: int, window: int) -> None:
    with decoding([prompt(80), prompt(87)], decoder=decoder) as (made, rows):
        found = selected(make(made, num_keys), made, rows)
        for place, row in enumerate(rows):
            for layer, (q_TNH, k_TGH) in enumerate(queries_and_keys(decoder, row.token_ids)):
                start = row.num_known - window
                for keys, scores in zip(found[layer][place], reference(q_TNH, k_TGH, window), strict=True):
                    assert keys[-window:] == list(range(start, row.num_known))
                    assert len(keys) == num_keys
                    assert keys == sorted(set(keys))
                    ranked = sorted(range(start), key=lambda key: (-scores[key], key))
                    best = set(ranked[: num_keys - window])
                    least = scores[ranked[num_keys - window - 1]]
                    apart = best ^ set(keys[:-window])
                    assert all(abs(scores[key] - least) < 1e-6 for key in apart)
                    assert len(apart) <= 2


def test_rows_no_longer_than_the_budget_attend_to_all_keys() -> None:
    with decoding([prompt(23), prompt(24)]) as (made, rows):
        view = make(made, 24)
        for heads_B in selected(view, made, rows):
            assert heads_B[0] == [list(range(24))] * 2  # the prompt, and its first output token
            assert [len(keys) for keys in heads_B[1]] == [24, 24]
        assert list(view._selected) == rows[1:]


def test_a_row_that_has_grown_by_half_its_keys_is_selected_for_anew() -> None:
    with decoding([prompt(60)]) as (made, rows):
        view, (row,) = make(made, 24), rows
        first, begun = selected(view, made, rows), row.num_known
        while row.num_known < begun + 11:
            made.engine.step()
        (grown,), (before,) = selected(view, made, rows)[3], first[3]
        assert grown == [[*keys, *range(begun, begun + 11)] for keys in before]
        made.engine.step()
        anew = selected(view, made, rows)
        assert anew == selected(make(made, 24), made, rows)
        assert {len(keys) for heads_B in anew for keys in heads_B[0]} == {24}


def test_selecting_leaves_the_row_as_it_was() -> None:
    with decoding([prompt(60), prompt(33)]) as (made, rows):
        residency = residency_of(made)
        layers = range(made.decoder.config.num_layers)

        def kv() -> list[torch.Tensor]:
            return [residency.kv(row.slot, at, TokenRange(0, row.num_cached)).clone() for row in rows for at in layers]

        before, num_bytes = kv(), made.slots.ledger().num_device_bytes
        selected(make(made, 16), made, rows)
        assert all(torch.equal(*each) for each in zip(kv(), before, strict=True))
        assert made.slots.ledger().num_device_bytes == num_bytes


def test_a_round_selects_for_few_rows_and_the_others_take_their_first_and_latest_keys_until_their_turn() -> None:
    with decoding([prompt(length) for length in (60, 19, 41, 70, 39, 51)]) as (made, rows):
        view, waiting = make(made, 20), [rows[at] for at in (3, 4, 5)]
        alone = {id(row): [heads_B[0] for heads_B in selected(make(made, 20), made, [row])] for row in rows}
        for num_waiting in (3, 1, 0):
            found = selected(view, made, rows)
            for place, row in enumerate(rows):
                keys = [heads_B[place] for heads_B in found]
                if row in waiting[3 - num_waiting :]:
                    last = row.num_known
                    assert keys == [[[*range(10), *range(last - 10, last)]] * 2] * 4
                else:
                    assert keys == alone[id(row)]


def test_drafts_of_later_rounds_are_those_of_a_view_without_a_past() -> None:
    """Right after a selection, whatever drafts were made and given up before."""
    with decoding([prompt(50)]) as (made, rows):
        view, draft_requests = make(made, 24), [DraftRequest(rows[0], 6)]
        proposer = SelfProposer(made.decoder, view, [24])
        while rows[0].num_known < 50 + 1 + 12:
            proposer.draft(draft_requests)
            made.engine.step()
        assert proposer.draft(draft_requests) == SelfProposer(made.decoder, make(made, 24), [24]).draft(draft_requests)
