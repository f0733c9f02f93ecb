"""A draft view of the keys that a row's latest tokens attend to most (SnapKV; Li et al., 2024; MagicDec, section 4.2).

In each layer and for each kv head a row keeps its window, which is its latest tokens, and the best of the earlier keys,
`num_keys` in all. With the window's queries q_t, each of J heads, and H numbers a key,

    w_t[j]  = softmax over the keys up to t of q_t . k[j] / sqrt(H)
    a[j]    = sum of w_t[j] over the window's queries, of all J heads that share the kv head
    score   = mean of a over the 5 keys around j, earlier keys only; others count as 0

and the best scores are kept, of equals the earlier key. MagicDec's code omits 1 / sqrt(H). Drafts attend to these keys
and to all from the window's start on, so up to half of `num_keys` more before a row's keys are selected anew.

The window's queries are needed, and the KV of a row does not tell them. They could be sent along with the KV by the
rank that computes the prompt's last tokens; but a row may also begin with a cached prefix, with a prompt that was
prefilled here, or resume with output of its own, and grows afterwards. So there is one way for all: the row's latest
tokens are run once more over the row's KV, with keys and values of their own, which are given up afterwards. The row
does not change, nothing is sent, and a selection follows the text as it grows. It costs a prefill of 32 tokens and the
window's scores, again for each `num_keys / 2` tokens. So that no round waits long, few rows are selected for in one
round, in a forward that they share; other rows that are due draft over their first and latest keys meanwhile.

Kept are int32 numbers of keys, one for each layer, kv head and kept key: next to KV too little to be counted.

Engine's thread. L layers, B rows, T tokens of the window, N heads, G kv heads, J = N / G, H head dim, S earlier keys,
K picks at most, M = J * T queries that share a kv head.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.ids import SlotId
from baton.types import TokenRange
from generate_workers.engine.rows import Row
from generate_workers.residency.device import DeviceResidency
from generate_workers.residency.port import DraftKeys, StepRows
from generate_workers.speculation.choosing import by_kv_head, top_keys
from generate_workers.speculation.self_drafts import DraftStep
from modeling.forward.decoder import Decoder
from modeling.forward.selection import StepPicks
from modeling.kv.buffers import BufferSpan, KvRows

_WINDOW_TOKENS = 32
_POOLED_KEYS = 5
_MOST_SELECTED = 2
"""Rows that are selected for in one round: with more, all rows of a batch would wait long for theirs."""


@dataclass(frozen=True)
class Selected:
    """The keys that drafts of one row attend to."""

    keys_LGK: Tensor
    """The selected keys, and behind them as many of those from the window's start on as may come to be; int32."""
    num_known: int
    """Tokens that the row had when they were selected."""
    num_left_out: int
    """Earlier keys that were not selected."""


class SnapKvView:
    """A DraftView of selected earlier keys and all latest ones, in the rows' own KV."""

    def __init__(self, decoder: Decoder, residency: DeviceResidency, keys: DraftKeys) -> None:
        """`keys`: the first and latest keys of rows that wait to be selected for; a selection has as many in all."""
        self._decoder = decoder
        self._residency = residency
        self._num_first = keys.num_first
        self._num_keys = num_keys = keys.num_first + keys.num_last
        self._num_window = min(_WINDOW_TOKENS, num_keys // 2)
        self._most_growth = num_keys // 2
        """Tokens by which a row grows before its keys are selected anew."""
        self._width = num_keys + self._most_growth + keys.most_drafts
        self._selected: dict[Row, Selected] = {}
        self._place_of: dict[SlotId, int] = {}
        """Places of the round's rows in `_keys_LBGK` and `_num_left_out`, which are made once a round."""
        self._keys_LBGK = torch.empty(0)
        self._num_left_out: list[int] = []

    def begin(self, rows: Sequence[Row], num_keys: Sequence[int] = ()) -> None:
        """Select the keys of some rows that have none, or have grown; gather those of all."""
        due = [row for row in rows if self._kept(row) is None][:_MOST_SELECTED]
        if due:
            self._selected |= zip(due, self._select(due), strict=True)
        selected = [self._kept(row) or self._first_and_latest(row, self._num_keys) for row in rows]
        self._place_of = {row.slot: place for place, row in enumerate(rows)}
        self._keys_LBGK = torch.stack([each.keys_LGK for each in selected], 1)
        self._num_left_out = [each.num_left_out for each in selected]

    @contextmanager
    def step(self, rows: StepRows) -> Iterator[DraftStep]:
        """Prepare a forward over the rows' keys, the new tokens' own among them."""
        places = [self._place_of[slot] for slot, _ in rows]
        keys_LBGK = self._keys_LBGK
        if places != list(range(keys_LBGK.shape[1])):
            keys_LBGK = keys_LBGK[:, places]
        num_kv_heads = keys_LBGK.shape[2]
        counts = [tokens.end - self._num_left_out[place] for (_, tokens), place in zip(rows, places, strict=True)]
        num_BG = torch.tensor(counts, dtype=torch.int32).unsqueeze(1).repeat(1, num_kv_heads)
        with self._residency.step(rows) as step:
            yield DraftStep(step.spans, step.turns, StepPicks(keys_LBGK, num_BG))

    def forget(self, row: Row) -> None:
        """Drop the row's keys."""
        self._selected.pop(row, None)

    def _kept(self, row: Row) -> Selected | None:
        """Return the row's keys; all, where it has no more than may be kept. None: they are to be selected."""
        if row.num_known <= self._num_keys:
            return self._first_and_latest(row, row.num_known)
        found = self._selected.get(row)
        return found if found is not None and row.num_known - found.num_known < self._most_growth else None

    def _first_and_latest(self, row: Row, num_keys: int) -> Selected:
        """Return so many keys at the row's start and end, the same for all kv heads."""
        layout, num_left_out = self._decoder.layout, row.num_known - num_keys
        keys_K = torch.arange(self._width, dtype=torch.int32)
        keys_K[self._num_first :] += num_left_out
        return Selected(keys_K.expand(layout.num_layers, layout.num_kv_heads, -1), row.num_known, num_left_out)

    def _select(self, rows: Sequence[Row]) -> list[Selected]:
        """Run the rows' windows once more, and return the keys that they attend to most."""
        decoder, size, num_selected = self._decoder, self._num_window, self._num_keys - self._num_window
        layout = decoder.layout
        windows = [TokenRange(row.num_known - size, row.num_known) for row in rows]
        scratch = replace(layout, num_layers=1)  # layers take turns in it
        spans = [BufferSpan(decoder.device.buffer(scratch, window), window) for window in windows]
        keys_LBGK = torch.empty(layout.num_layers, len(rows), layout.num_kv_heads, self._width, dtype=torch.int32)
        for place, window in enumerate(windows):
            keys_LBGK[:, place, :, num_selected:] = window.start + torch.arange(self._width - num_selected)
        step = decoder.begin(spans)
        hidden_TD = decoder.embed([each for row in rows for each in row.token_ids[-size:]], step)
        for layer in range(layout.num_layers):
            q_TNH = decoder.project(layer, hidden_TD, step)
            q_BTNH, attended = q_TNH.view(len(rows), size, *q_TNH.shape[1:]), []
            for place, (row, span, own_q_TNH) in enumerate(zip(rows, spans, q_BTNH, strict=True)):
                earlier_S2GH = self._residency.kv(row.slot, layer, TokenRange(0, span.tokens.start))
                scores_GS = window_scores(own_q_TNH, earlier_S2GH[:, 0], span.own(layer)[:, 0])
                keys_LBGK[layer, place, :, :num_selected] = top_keys(scores_GS, num_selected)
                attention = decoder.attention(layer, own_q_TNH, span.tokens.start)
                attention.add(KvRows(earlier_S2GH[:, 0], earlier_S2GH[:, 1], 0), *span.segments(layer))
                attended.append(attention.result())
            hidden_TD = decoder.complete(layer, hidden_TD, torch.cat(attended))
        left_out = [window.start - num_selected for window in windows]
        found = zip(keys_LBGK.unbind(1), rows, left_out, strict=True)
        return [Selected(keys_LGK, row.num_known, num) for keys_LGK, row, num in found]


def window_scores(q_TNH: Tensor, k_SGH: Tensor, own_TGH: Tensor) -> Tensor:
    """Return the pooled scores of earlier keys, fp32 `[G, S]`: how much the window's queries attend to each.

    `q_TNH` are the window's queries as attention compares them, `own_TGH` the window's keys, each seen from its own
    query on. One kv head at a time, so that a long row's weights take `[M, S]` at once.
    """
    num_tokens, num_kv_heads = q_TNH.shape[0], k_SGH.shape[1]
    q_GMH = by_kv_head(q_TNH, num_kv_heads).flatten(1, 2)
    is_hidden_TT = torch.ones(num_tokens, num_tokens, dtype=torch.bool).triu(1)
    is_hidden_MT = is_hidden_TT.repeat(q_GMH.shape[1] // num_tokens, 1)
    scores_GS = torch.empty(num_kv_heads, len(k_SGH))
    for head, q_MH in enumerate(q_GMH):
        earlier_MS = q_MH @ k_SGH[:, head].float().T
        own_MT = (q_MH @ own_TGH[:, head].float().T).masked_fill_(is_hidden_MT, -torch.inf)
        most_M1 = torch.maximum(earlier_MS.amax(1, keepdim=True), own_MT.amax(1, keepdim=True))
        earlier_MS.sub_(most_M1).exp_()
        sums_M = earlier_MS.sum(1) + own_MT.sub_(most_M1).exp_().sum(1)
        scores_GS[head] = sums_M.reciprocal() @ earlier_MS
    return F.avg_pool1d(scores_GS, _POOLED_KEYS, stride=1, padding=_POOLED_KEYS // 2)
