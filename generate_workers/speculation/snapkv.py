"""Draft view of the keys to which a sequence's latest tokens attend most (SnapKV, Li et al., 2024; MagicDec, 4.2).

A draft view selects the keys that draft steps attend to. In each layer and for each kv head, drafts attend to
`num_keys` keys of a sequence. The latest tokens of the sequence are its window. Drafts attend to all keys of the
window, and to those earlier keys (keys before the window) that have the best scores. J heads share a kv head, and H is
the head dim. With the queries q_t of the window's tokens t, and the keys k[j],

    w_t[j]  = softmax of q_t . k[j] / sqrt(H) over the keys j <= t
    a[j]    = sum of w_t[j] over all tokens t of the window and the J heads
    score   = mean of a over the key j and its 2 neighbours on each side, where a = 0 outside the earlier keys

If scores are equal, the earlier key is selected. MagicDec's code omits 1 / sqrt(H). Drafts attend to the selected keys
and to all keys from the window's start. As the sequence grows, they attend to up to `num_keys / 2` additional keys
before the keys are selected again.

The selection needs the window's queries, which the KV does not contain. The rank that computes the prompt's last tokens
could send these queries with the KV. But a sequence may also begin with a cached prefix or a local prefill, or resume
with output of its own, and it grows afterwards. All cases therefore use the same method: the sequence's latest tokens
are run once more over its KV, with temporary KV. The sequence does not change, nothing is sent, and the selection
follows the text as it grows.

A selection costs a prefill of 32 tokens and the window's scores. It is repeated after every `num_keys / 2` new tokens.
A round consists of draft steps and the step that verifies the drafts. To limit its duration, selections are made for
only a few sequences per round, in a shared forward pass. A sequence that still waits for its selection uses its first
and latest keys for drafts.

A selection is one int32 index per layer, kv head and kept key. It is not counted as KV memory, because it is small.

Used on the engine's thread. Shape suffixes: L layers, B sequences, T tokens of the window, N heads, G kv heads, J = N /
G, H head dim, S earlier keys, K selected keys at most, M = J * T queries that share a kv head.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.modeling.forward.decoder import Decoder
from baton.modeling.forward.selection import StepPicks
from baton.modeling.kv.buffers import BufferSpan, KvRows
from baton.types import SlotId, TokenRange
from generate_workers.engine.rows import Row
from generate_workers.residency.device import DeviceResidency
from generate_workers.residency.port import DraftKeys, StepRows
from generate_workers.speculation.choosing import by_kv_head, top_keys
from generate_workers.speculation.self_drafts import DraftStep

_WINDOW_TOKENS = 32
_POOLED_KEYS = 5
_MOST_SELECTED = 2
"""Maximum number of sequences whose keys are selected in one round (draft steps, and the step that verifies the
drafts). A higher number would delay the whole batch."""


@dataclass(frozen=True)
class Selected:
    """Result of one selection: the keys that the drafts of one sequence attend to."""

    keys_LGK: Tensor
    """Indices, int32, of the keys to attend to. The selected earlier keys come first. All keys of the window follow.
    The window consists of the tokens that were the latest ones when the keys were selected, and of all tokens that are
    added later."""
    num_known: int
    """Number of tokens of the sequence when its keys were selected."""
    num_left_out: int
    """Number of earlier keys (keys before the window of latest tokens) that were not selected."""


class SnapKvView:
    """Draft view (selection of the keys that draft steps attend to): some earlier keys of each sequence, and all keys
    of its latest tokens. Keys are read in the sequence's own KV."""

    def __init__(self, decoder: Decoder, residency: DeviceResidency, keys: DraftKeys) -> None:
        """`keys`: numbers of first and latest keys that a sequence's drafts attend to before its keys have been
        selected. A selection has as many keys as these two numbers together."""
        self._decoder = decoder
        self._residency = residency
        self._num_first = keys.num_first
        self._num_keys = num_keys = keys.num_first + keys.num_last
        self._num_window = min(_WINDOW_TOKENS, num_keys // 2)
        self._most_growth = num_keys // 2
        """Number of tokens by which a sequence grows before its keys are selected again."""
        self._width = num_keys + self._most_growth + keys.most_drafts
        self._selected: dict[Row, Selected] = {}
        self._place_of: dict[SlotId, int] = {}
        """Index of each sequence of the present round (dimension B) in `_keys_LBGK` and in `_num_left_out`, by slot."""
        self._keys_LBGK = torch.empty(0)
        self._num_left_out: list[int] = []

    def begin(self, rows: Sequence[Row], num_keys: Sequence[int] = ()) -> None:
        """Select keys for sequences that have no selection, or that have grown too much since their last selection. If
        there are more than `_MOST_SELECTED` such sequences, the remaining ones use their first and latest keys in this
        round. Then collect the keys of all sequences in `rows` for the round. `num_keys` is ignored."""
        due = [row for row in rows if self._kept(row) is None][:_MOST_SELECTED]
        if due:
            self._selected |= zip(due, self._select(due), strict=True)
        selected = [self._kept(row) or self._first_and_latest(row, self._num_keys) for row in rows]
        self._place_of = {row.slot: place for place, row in enumerate(rows)}
        self._keys_LBGK = torch.stack([each.keys_LGK for each in selected], 1)
        self._num_left_out = [each.num_left_out for each in selected]

    @contextmanager
    def step(self, rows: StepRows) -> Iterator[DraftStep]:
        """Prepare a draft step. It attends to the keys that `begin` collected, and to the keys of the tokens added
        since then."""
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
        """Drop the keys that were selected for the sequence."""
        self._selected.pop(row, None)

    def _kept(self, row: Row) -> Selected | None:
        """Return the sequence's selection, which is all keys if the sequence has at most `num_keys` keys; None if a
        selection must be made."""
        if row.num_known <= self._num_keys:
            return self._first_and_latest(row, row.num_known)
        found = self._selected.get(row)
        return found if found is not None and row.num_known - found.num_known < self._most_growth else None

    def _first_and_latest(self, row: Row, num_keys: int) -> Selected:
        """Return a selection of `num_keys` keys at the sequence's start and end. It is the same for all kv heads."""
        layout, num_left_out = self._decoder.layout, row.num_known - num_keys
        keys_K = torch.arange(self._width, dtype=torch.int32)
        keys_K[self._num_first :] += num_left_out
        return Selected(keys_K.expand(layout.num_layers, layout.num_kv_heads, -1), row.num_known, num_left_out)

    def _select(self, rows: Sequence[Row]) -> list[Selected]:
        """Run the tokens of the sequences' windows once more, and return the keys that these tokens attend to most."""
        decoder, size, num_selected = self._decoder, self._num_window, self._num_keys - self._num_window
        layout = decoder.layout
        windows = [TokenRange(row.num_known - size, row.num_known) for row in rows]
        scratch = replace(layout, num_layers=1)  # all layers use it, one after another
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
    """Return the scores of the keys before the window, fp32 `[G, S]`. A key's score is computed from the attention
    weights of the window's queries and averaged over neighbouring keys, as the module's docstring defines.

    `q_TNH`: the window's queries after RoPE. `k_SGH`: the keys before the window. `own_TGH`: the window's keys; a query
    attends to those up to its own position. The kv heads are computed one at a time, so that the attention weights need
    memory for only `[M, S]`, where M is the number of queries that share a kv head.
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
