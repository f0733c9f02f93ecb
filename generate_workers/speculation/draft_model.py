"""Drafts made by a second, smaller model with the same tokenizer. It has its own KV of each sequence's first and latest
tokens.

For each sequence, the small model keeps the KV of a few first tokens and of the latest tokens, together `draft_keys`
tokens (StreamingLLM; Xiao et al., 2023). Its memory and step time therefore do not grow with the context. Before a
sequence's first drafts, only these tokens are run through the small model, at their true positions. The tokens between
them are not run, because they are never attended to. The small model thus has less context than after a full prefill.
This changes the drafts, but not the tokens that verification accepts.

A round consists of draft steps, in which the small model drafts tokens, and of the large model's step that verifies
the drafts. After a round, the small model already has the KV of accepted drafts, because it has run each of them to
make the next draft. Only the round's last draft has not been run. The KV of rejected drafts is overwritten. If all
drafts were accepted, the first draft step of the next round therefore runs two tokens of the sequence: the last draft,
and the token that the large model has sampled.

`speculator` calls this module on the engine's thread. Shape suffixes: R sequences of a step, T tokens, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from baton.modeling.forward.decoder import Decoder
from baton.planning.speculation import Ints
from baton.types import TokenRange
from generate_workers.engine.rows import Row
from generate_workers.engine.verified import Draft
from generate_workers.residency.draft_window import DraftWindow
from generate_workers.residency.port import DraftKeys
from generate_workers.residency.row_parts import MakeMemory
from generate_workers.speculation.port import DraftOffers, DraftRequest
from generate_workers.speculation.stepwise import Going, draft_by_steps


@dataclass
class _RowState:
    """Small model's KV of one sequence, and the tokens whose KV it is."""

    kv: DraftWindow
    num_known: int = 0
    """Number of the sequence's first tokens that the small model had processed before its latest drafts. Tokens that
    the small model skips, because it never attends to them, are included."""
    run_ids: list[int] = field(default_factory=list)
    """Latest drafts that the small model has run, as token ids. Their KV is stored directly after the KV of the
    sequence's first `num_known` tokens."""
    start: int = 0
    """Position, in the sequence, of the first token that the next draft step runs."""

    def settle(self, token_ids: Sequence[int]) -> None:
        """Keep the KV of accepted drafts, and discard the KV of other drafts. `token_ids`: all known tokens of the
        sequence."""
        num_seen, tokens = self.num_known, token_ids[self.num_known :]
        for draft, token in zip(self.run_ids, tokens, strict=False):
            if draft != token:
                break
            num_seen += 1
        self.num_known, self.run_ids = min(num_seen, len(token_ids) - 1), []
        self.kv.settle(self.num_known)


class ModelProposer:
    """Proposer (source of drafts) that runs a small model. A step of the small model drafts one token for each
    sequence."""

    def __init__(
        self, decoder: Decoder, keys: DraftKeys, num_rows: int, make_memory: MakeMemory, *, keeps: bool = False
    ) -> None:
        """`decoder` is the small model. It must have the same vocabulary as the large model, and no sliding windows.
        `keys`: numbers of first and latest keys that it attends to. `num_rows`: maximum number of sequences that have a
        slot at the same time. `keeps`: True if the distributions from which drafts were sampled must be kept. Raises
        the errors of `make_memory`."""
        assert all(window is None for window in decoder.config.windows), "keys are kept by number, not by window"
        self._decoder = decoder
        self._keeps = keeps
        self._num_keys = keys.num_first + keys.num_last
        self._free = [DraftWindow(decoder.layout, make_memory, keys) for _ in range(num_rows)]
        self._states: dict[Row, _RowState] = {}

    @property
    def num_bytes(self) -> int:
        """Return the number of committed bytes of the small model's KV, for all sequences."""
        kept = [state.kv for state in self._states.values()]
        return sum(kv.num_bytes for kv in (*kept, *self._free))

    def offers(self, rows: Sequence[Row], num_known_B: Ints, most_drafts_B: Ints) -> DraftOffers:
        """Return one option, whose number of drafts is limited by the small model's maximum length."""
        num_B1 = np.minimum(most_drafts_B, self._decoder.config.max_position - num_known_B + 1).clip(0)[:, None]
        return DraftOffers(num_B1, np.zeros_like(num_B1), np.full_like(num_B1, self._num_keys))

    @torch.inference_mode()
    def prepare(self, rows: Sequence[Row]) -> None:
        """Compute the KV that the small model still lacks, for the tokens of each sequence that drafts attend to. The
        sequence's last token is left to the first draft step. If exactly one token before it lacks KV, this token is
        left to the first draft step, too."""
        for row in rows:
            state = self._state(row)
            state.settle(row.token_ids)
            num_seen = row.num_known - 1
            missing = state.kv.missing(num_seen)
            if sum(map(len, missing)) == 1:
                state.start = missing[0].start
                continue
            for tokens in missing:  # one range after the other, since the latest tokens attend to the first
                ids = row.token_ids[tokens.start : tokens.end]
                self._decoder.forward(ids, [state.kv.span(tokens)])
            state.start = num_seen
            state.kv.settle(num_seen)

    @torch.inference_mode()
    def draft(self, draft_requests: Sequence[DraftRequest]) -> list[Draft]:
        """Return a draft for each request, with the requested number of tokens, or fewer if drafting stops early. Each
        draft token is the token that the sequence's sampler selects from the small model's logits. `prepare` must have
        been called."""
        drafts = draft_by_steps(draft_requests, self._run, keeps=self._keeps)
        for request, draft in zip(draft_requests, drafts, strict=True):
            state = self._states[request.row]
            state.num_known, state.run_ids = request.row.num_known, draft.token_ids[:-1]
        return drafts

    def forget(self, row: Row) -> None:
        """Free the small model's KV of the sequence."""
        state = self._states.pop(row, None)
        if state is not None:
            state.kv.release()
            self._free.append(state.kv)

    def _state(self, row: Row) -> _RowState:
        if row not in self._states:
            kv = self._free[-1]
            kv.open(row.num_known, row.capacity_tokens)  # if this raises, `kv` stays free
            self._states[row] = _RowState(self._free.pop())
        return self._states[row]

    def _run(self, going: Going, index: int) -> Tensor:
        """Run each sequence's next token through the small model; in the first step, run all known tokens that the
        small model has not run. Return the logits, `[R, V]`."""
        ids, spans, lasts = list[int](), [], list[int]()
        for row, draft in going:
            state, end = self._states[row], row.num_known + index
            start = end - 1 if index else state.start
            ids += draft.token_ids[-1:] if index else row.token_ids[start:]
            spans.append(state.kv.span(TokenRange(start, end)))
            lasts.append(len(ids) - 1)
        most_queries = max(len(span.tokens) for span in spans)
        hidden_TD = self._decoder.forward(ids, spans, most_queries=most_queries)
        return self._decoder.logits(hidden_TD[lasts])
