"""Tensor work of one step: a forward over sequences with different numbers of tokens, and the logits for sampling. Runs
on the engine's thread.

`engine.core` passes the plans of `scheduling_policy` to this module. The residency policy provides the KV.
`baton.modeling.forward.decoder` runs the forward.

Shape suffixes: X tokens whose hidden states are computed to the end, D hidden size.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.errors import InvalidArgumentError, NotFiniteError
from baton.modeling.forward.decoder import Decoder
from baton.modeling.forward.sampling import score
from baton.modeling.forward.step_graphs import DecodeRow, PendingTokens, StepGraphs
from baton.modeling.forward.weight_sizes import step_reads
from baton.modeling.kv.pages import PageSpan
from baton.types import SlotId, TokenRange
from generate_workers.engine.rows import Row
from generate_workers.engine.scheduling_policy import RowSpan, StepPlan
from generate_workers.engine.speculation import SpeculationStats
from generate_workers.engine.status import StepStats
from generate_workers.engine.verified import NO_DRAFT, Draft, Drafts, Verified
from generate_workers.residency.port import Residency, RowError

_SCORED_TOKENS = 64
"""Number of prompt tokens whose logits are computed at once for prompt logprobs. The logits of one token need 4 bytes
for each token of the vocabulary."""


@dataclass(frozen=True)
class LaunchedStep:
    """Step that was launched on the device, and whose tokens the host has not read yet."""

    plan: StepPlan
    places: Mapping[Row, int]
    """Index of each sequence in the step."""
    tokens: PendingTokens
    """Next token of each sequence."""
    num_kv_bytes: int
    """Bytes of KV that attention reads."""


class ModelRunner:
    """Runs the forward of planned steps. The KV may be in host memory or in device memory."""

    def __init__(self, decoder: Decoder, residency: Residency, decode_steps: StepGraphs | None = None) -> None:
        """Make a runner. `decode_steps` runs the plans that it supports, entirely on the device. None: the decoder runs
        all plans."""
        self._decoder = decoder
        self._residency = residency
        self._decode_steps = decode_steps
        self._reads = step_reads(decoder.weights)
        self._num_kv_bytes = 0
        """Bytes of KV that attention read in the last step, not counting the steps that made its drafts."""
        self._num_link_bytes = 0
        """Total number of bytes that had been copied between host and device at the last call of `begin`, before the
        last step and its draft steps."""
        self._num_drafts = 0
        """Number of drafts that the last step verified."""
        self._num_tokens = 0
        """Number of tokens that the last step ran."""

    @property
    def replays(self) -> bool:
        """True if steps that only decode replay CUDA graphs, unless a request needs more than its next token."""
        return self._decode_steps is not None and self._decode_steps.captures

    def begin(self) -> None:
        """Start to count the bytes that the next step copies between host and device. Must be called before the step's
        drafts are made."""
        self._num_link_bytes = self._residency.num_link_bytes

    def stats(self, plan: StepPlan, duration_s: float, drafted: SpeculationStats | None = None) -> StepStats:
        """Return the statistics of the last step that `run` ran, with `plan`, which took `duration_s` seconds.
        `drafted` has the statistics of the drafts that the step verified; None: there were no drafts."""
        round = drafted or SpeculationStats()
        return StepStats(
            num_decode_rows=plan.decoding.num_rows,
            num_prefill_tokens=plan.num_prefill_tokens,
            duration_s=duration_s,
            num_kv_bytes=self._num_kv_bytes + round.num_draft_kv_bytes,
            num_weight_bytes=self._reads.of(self._num_tokens) + round.num_draft_weight_bytes,
            num_link_bytes=self._residency.num_link_bytes - self._num_link_bytes,
            num_drafts=self._num_drafts,
            num_draft_kv_bytes=round.num_draft_kv_bytes,
            predicted_s=round.predicted_s if self._num_drafts else 0.0,
        )

    def launched_stats(self, step: LaunchedStep, duration_s: float) -> StepStats:
        """Return the statistics of a launched step, which took `duration_s` seconds."""
        num_rows = len(step.places)
        num_bytes = step.num_kv_bytes, self._reads.of(num_rows)
        return StepStats(num_rows, 0, duration_s, *num_bytes, num_link_bytes=0, is_replayed=self.replays)

    @torch.inference_mode()
    def launch(self, plan: StepPlan, rows: Mapping[SlotId, Row], behind: LaunchedStep | None) -> LaunchedStep | None:
        """Launch a step that runs entirely on the device, and do not wait for it. `behind`: the step before, if its
        tokens have not been read; else None. `rows` has the sequences by slot. Return None, and run nothing, if the
        plan is empty, has drafts, or needs the host."""
        if self._decode_steps is None or plan.is_launched or not plan:
            return None
        planned = [rows[span.slot] for span in plan.spans]
        if not all(map(_needs_no_host, planned, plan.spans)):
            return None
        draws = [row.sampler.row_draw(row.num_unread) for row in planned]
        places = {} if behind is None else behind.places
        with self._residency.step([(span.slot, span.tokens) for span in plan.spans]) as step:
            decoding = []
            for row, part, span, draw in zip(planned, plan.spans, step.spans, draws, strict=True):
                if not isinstance(span, PageSpan) or draw is None:
                    return None
                token_id, source = (0, places[row]) if row.num_unread else (row.token_ids[-1], -1)
                decoding.append(DecodeRow(token_id, span.pages.table, part.tokens.end, draw, source))
            tokens = self._decode_steps.launch(decoding)
        return LaunchedStep(plan, {row: place for place, row in enumerate(planned)}, tokens, step.num_bytes_read)

    @torch.inference_mode()
    def run(self, plan: StepPlan, rows: Mapping[SlotId, Row], drafts: Drafts) -> Verified:
        """Run one forward over the plan's spans, each followed by the drafts of its sequence. `rows` has the sequences
        by slot. Return the logits of the sequences whose last known token was run. Choices of the same request that get
        their first token share one set of logits. The result lists these choices in the order: leader (first choice),
        then its followers. Raises RowError."""
        self._num_drafts = sum(map(len, drafts.values()))
        token_ids: list[int] = []
        spans: list[tuple[SlotId, TokenRange]] = []
        starts: list[int] = []
        sampling: list[tuple[Row, Draft, int]] = []
        places: list[int] = []  # of the tokens whose logits are needed
        for part in plan.spans:
            row, draft = rows[part.slot], drafts.get(part.slot, NO_DRAFT)
            starts.append(len(token_ids))
            token_ids += row.token_ids[part.tokens.start : part.tokens.end] + draft.token_ids
            spans.append((part.slot, TokenRange(part.tokens.start, part.tokens.end + len(draft))))
            if part.samples:
                sampling += [(each, draft, len(places)) for each in (row, *row.followers)]
                places += range(len(token_ids) - len(draft) - 1, len(token_ids))
        self._num_tokens = len(token_ids)
        scores = any(len(rows[part.slot].unscored(part.tokens)) for part in plan.spans)
        needs_all = scores or len(places) == len(token_ids)
        most_queries = 1 + max(map(len, drafts.values()), default=0)
        with self._residency.step(spans) as step:
            results = None if needs_all else places
            hidden_XD = self._decoder.forward(
                token_ids, step.spans, step.turns, most_queries=most_queries, results=results
            )
            _settle(plan, rows, drafts)
            self._num_kv_bytes = step.num_bytes_read
        if needs_all:
            for part, start in zip(plan.spans, starts, strict=True):
                self._score(rows[part.slot], part.tokens, hidden_XD[start:])
            hidden_XD = hidden_XD[places]
        return Verified(self._decoder.logits(hidden_XD) if places else hidden_XD[:0], sampling)

    def _score(self, row: Row, tokens: TokenRange, hidden_XD: Tensor) -> None:
        """Score the prompt's tokens if the request asks for it. `hidden_XD` begins with the hidden states of `tokens`.
        Raises RowError when the logits are not finite."""
        for part in row.unscored(tokens).split(_SCORED_TOKENS):
            rows = slice(part.start - tokens.start, part.end - tokens.start)
            num_top = row.sampler.params.prompt_logprobs
            assert num_top is not None
            successors = row.token_ids[part.start + 1 : part.end + 1]
            try:
                row.add_scores(score(self._decoder.logits(hidden_XD[rows]), successors, num_top))
            except NotFiniteError as error:
                raise RowError(row.slot, str(error)) from error


def _settle(plan: StepPlan, rows: Mapping[SlotId, Row], drafts: Drafts) -> None:
    """Wait for the token masks of the sequences that sample, which are computed while the forward runs. Raises
    RowError."""
    for part in plan.spans:
        if part.samples:
            leader = rows[part.slot]
            try:
                for row in (leader, *leader.followers):
                    row.sampler.settle(len(drafts.get(part.slot, NO_DRAFT)))
            except InvalidArgumentError as error:
                raise RowError(part.slot, str(error)) from error


def _needs_no_host(row: Row, span: RowSpan) -> bool:
    """Return True if a sequence runs only its last known token, and samples the next one for itself alone."""
    is_decoding = len(span.tokens) == 1 and span.samples and not span.num_drafts
    return is_decoding and not row.followers and not len(row.unscored(span.tokens))
