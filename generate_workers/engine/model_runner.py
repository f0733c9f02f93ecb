"""Tensor work of one step: a forward over sequences with different numbers of tokens, and the logits for sampling. Runs
on the engine's thread.

`engine.core` passes the plans of `scheduling_policy` to this module. The residency policy provides the KV.
`baton.modeling.forward.decoder` runs the forward.

Shape suffixes: X tokens whose hidden states are computed to the end, D hidden size.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from baton.errors import InvalidArgumentError, NotFiniteError
from baton.modeling.forward.decoder import Decoder
from baton.modeling.forward.drawing import RowDraw
from baton.modeling.forward.sampling import score
from baton.modeling.forward.step_graphs import PendingTokens, StartedStep, StepGraphs
from baton.modeling.forward.triton.step_inputs import StepTokens
from baton.modeling.forward.weight_sizes import step_reads
from baton.types import SlotId, TokenRange
from generate_workers.engine.rows import Row
from generate_workers.engine.scheduling_policy import RowSpan, StepPlan
from generate_workers.engine.speculation import SpeculationStats
from generate_workers.engine.status import StepStats
from generate_workers.engine.verified import NO_DRAFT, Draft, Drafts, Verified
from generate_workers.residency.port import Residency, RowError, StepKv

_SCORED_TOKENS = 64
"""Number of prompt tokens whose logits are computed at once for prompt logprobs. The logits of one token need 4 bytes
for each token of the vocabulary."""


@dataclass
class LaunchedStep:
    """Step that was launched on the device, and whose tokens the host has not read yet."""

    plan: StepPlan
    places: Mapping[Row, int]
    """Index in `tokens` of each sequence that samples."""
    tokens: PendingTokens | StartedStep
    """Next token of each sequence. A StartedStep: the tokens must be drawn after the step before has been read, because
    the host changes the logits first."""
    num_tokens: int
    """Number of new tokens of all sequences."""
    num_kv_bytes: int
    """Bytes of KV that attention reads."""
    failed: dict[Row, InvalidArgumentError] = field(default_factory=dict)
    """Sequences whose token could not be drawn, because their grammar does not allow their output."""
    error: Exception | None = None
    """Error with which the drawing failed."""


@dataclass(frozen=True)
class _Gathered:
    """Tokens that a planned step runs."""

    token_ids: list[int]
    """New tokens of all sequences, concatenated. 0 for a token that the host has not read."""
    unread: dict[int, int]
    """Places of the tokens that the host has not read (`StepTokens.sources`), by the index of the token."""
    spans: list[tuple[SlotId, TokenRange]]
    starts: list[int]
    """Index of each sequence's first new token."""
    sampling: list[tuple[Row, Draft, int]]
    """Sequences that sample, as in `Verified`."""
    results: list[int]
    """Indices of the tokens whose logits are needed."""

    @classmethod
    def of(
        cls, plan: StepPlan, rows: Mapping[SlotId, Row], drafts: Drafts, unread: Mapping[Row, int] | None = None
    ) -> "_Gathered":
        """Return the tokens of the plan's spans, each followed by the drafts of its sequence. `unread`: place of the
        last token of each sequence for which the host has not read this token (`StepTokens.sources`)."""
        made = cls([], {}, [], [], [], [])
        for part in plan.spans:
            row, draft = rows[part.slot], drafts.get(part.slot, NO_DRAFT)
            made.starts.append(len(made.token_ids))
            known = row.token_ids[part.tokens.start : part.tokens.end]
            if len(known) < len(part.tokens):
                assert unread is not None, "the host knows the tokens of a step that it runs"
                made.unread[len(made.token_ids) + len(known)] = unread[row]
                known.append(0)
            for index, (step, place) in enumerate(draft.unread):
                made.unread[len(made.token_ids) + len(known) + index] = step.first + place
            made.token_ids.extend([*known, *draft.token_ids])
            made.spans.append((part.slot, TokenRange(part.tokens.start, part.tokens.end + len(draft))))
            if part.samples:
                made.sampling.extend((each, draft, len(made.results)) for each in (row, *row.followers))
                made.results.extend(range(len(made.token_ids) - len(draft) - 1, len(made.token_ids)))
        return made

    def step(self, draws: Sequence[RowDraw] | None) -> StepTokens:
        """Return the step for the device. `draws`: parameters for drawing a token from each result, or None."""
        sources = [-1] * len(self.token_ids)
        for index, place in self.unread.items():
            sources[index] = place
        positions = [position for _, tokens in self.spans for position in range(tokens.start, tokens.end)]
        return StepTokens(self.token_ids, sources, positions, self.results, draws)


class ModelRunner:
    """Runs the forward of planned steps. The KV may be in host memory or in device memory."""

    def __init__(self, decoder: Decoder, residency: Residency, device_steps: StepGraphs | None = None) -> None:
        """Make a runner. `device_steps` runs steps entirely on the device. None: the decoder runs all steps."""
        self._decoder = decoder
        self._residency = residency
        self._device_steps = device_steps
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
    def runs_ahead(self) -> bool:
        """True if steps may be launched before the step before has been read."""
        return self._device_steps is not None

    @property
    def replays(self) -> bool:
        """True if steps replay CUDA graphs, except steps that fit into no graph, and draft steps of a draft model."""
        return self._device_steps is not None and self._device_steps.captures

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
        plan, num_weight_bytes = step.plan, self._reads.of(step.num_tokens)
        sizes = plan.decoding.num_rows, plan.num_prefill_tokens
        return StepStats(*sizes, duration_s, step.num_kv_bytes, num_weight_bytes, num_link_bytes=0)

    @torch.inference_mode()
    def launch(self, plan: StepPlan, rows: Mapping[SlotId, Row], behind: LaunchedStep | None) -> LaunchedStep | None:
        """Launch a step entirely on the device, and do not wait for it. `behind`: the step before, if its tokens have
        not been read; else None. `rows` has the sequences by slot. Return None, and run nothing, if the plan is empty,
        has drafts, scores a prompt, or samples for several choices."""
        if self._device_steps is None or not plan:
            return None
        if not all(_runs_ahead(rows[span.slot], span) for span in plan.spans):
            return None
        unread = dict[Row, int]()
        if behind is not None:
            assert isinstance(behind.tokens, PendingTokens), "the step before has been drawn"
            unread = {row: behind.tokens.first + place for row, place in behind.places.items()}
        gathered = _Gathered.of(plan, rows, {}, unread)
        draws = _draws(gathered.sampling)
        with self._residency.step(gathered.spans) as step:
            launch = self._device_steps.start if draws is None else self._device_steps.launch
            launched = launch(gathered.step(draws), step.spans)
        places = {row: place for row, _, place in gathered.sampling}
        return LaunchedStep(plan, places, launched, len(gathered.token_ids), step.num_bytes_read)

    @torch.inference_mode()
    def draw(self, step: LaunchedStep) -> PendingTokens:
        """Launch the drawing of a step's tokens, unless it was launched with the step, and return the tokens. The step
        before must have been read. Sequences whose grammar does not allow their output are added to `step.failed`, and
        their tokens mean nothing."""
        if isinstance(step.tokens, PendingTokens):
            return step.tokens
        if step.error is not None:
            raise step.error
        rows = [row for row in step.places if row.batch_slot is not None]  # others have ended
        for row in rows:
            try:
                row.sampler.settle(0)
            except InvalidArgumentError as error:
                step.failed[row] = error
        draws = [RowDraw.of(row.sampler.params, row.sampler.position) for row in step.places]

        def adjust(logits_RV: Tensor) -> None:
            for row in rows:
                if row not in step.failed:
                    row.sampler.adjust(logits_RV[step.places[row]])

        try:
            step.tokens = step.tokens.draw(draws, adjust)
        except Exception as error:
            step.error = error  # logits may have been changed already, so the drawing is not repeated
            raise
        return step.tokens

    @torch.inference_mode()
    def run(
        self,
        plan: StepPlan,
        rows: Mapping[SlotId, Row],
        drafts: Drafts,
        read: Callable[[], None],
        *,
        needs_logits: bool = True,
    ) -> Verified:
        """Run one forward over the plan's spans, each followed by the drafts of its sequence. `rows` has the sequences
        by slot. `read`: reads the drafts. It is called after the step is launched if the step finds the drafts on the
        device, else before. Return the logits of the sequences whose last known token was run, or, if `needs_logits` is
        False and the device can draw them, their next tokens. Choices of the same request that get their first token
        share one set of logits. The result lists these choices in the order: leader (first choice), then its followers.
        Raises RowError."""
        self._num_drafts = sum(map(len, drafts.values()))
        scores = any(len(rows[part.slot].unscored(part.tokens)) for part in plan.spans)
        on_device = None if scores else self._device_steps
        if on_device is None:
            read()
        gathered = _Gathered.of(plan, rows, drafts)
        self._num_tokens = len(gathered.token_ids)
        with self._residency.step(gathered.spans) as step:
            if on_device is not None:
                found = None if needs_logits else _draws(gathered.sampling)
                verified = _on_device(on_device, gathered, step, found, read)
            else:
                verified = self._forward(plan, rows, gathered, step, scores=scores)
            _settle(plan, rows, drafts)
            self._num_kv_bytes = step.num_bytes_read
        return verified

    def _forward(
        self, plan: StepPlan, rows: Mapping[SlotId, Row], gathered: _Gathered, step: StepKv, *, scores: bool
    ) -> Verified:
        """Run the forward by the decoder. `scores`: prompt logprobs must be computed."""
        results = gathered.results
        needs_all = scores or len(results) == len(gathered.token_ids)
        most_queries = 1 + max((len(draft) for _, draft, _ in gathered.sampling), default=0)
        hidden_XD = self._decoder.forward(
            gathered.token_ids,
            step.spans,
            step.turns,
            most_queries=most_queries,
            results=None if needs_all else results,
        )
        if needs_all:
            for part, start in zip(plan.spans, gathered.starts, strict=True):
                self._score(rows[part.slot], part.tokens, hidden_XD[start:])
            hidden_XD = hidden_XD[results]
        return Verified(self._decoder.logits(hidden_XD) if results else hidden_XD[:0], gathered.sampling)

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


def _runs_ahead(row: Row, span: RowSpan) -> bool:
    """Return True if a sequence's part of a plan can be launched before the step before has been read."""
    if span.num_drafts or len(row.unscored(span.tokens)):
        return False
    return not (span.samples and row.followers)


def _on_device(
    steps: StepGraphs, gathered: _Gathered, step: StepKv, draws: Sequence[RowDraw] | None, read: Callable[[], None]
) -> Verified:
    """Run the forward by `steps`, and call `read` while it runs. `draws`: parameters for drawing a token from each
    result on the device; None: the host draws."""
    tokens = gathered.step(draws)
    if draws is None:
        logits_RV = steps.logits(tokens, step.spans)
        read()
        return Verified(logits_RV, gathered.sampling)
    pending = steps.launch(tokens, step.spans)
    read()
    return Verified(torch.empty(0), gathered.sampling, pending.result())


def _draws(sampling: Sequence[tuple[Row, Draft, int]]) -> list[RowDraw] | None:
    """Return the parameters for drawing a token from each row of logits. None: the host must draw, or several sequences
    sample from the same logits."""
    found = list[RowDraw]()
    for row, draft, place in sampling:
        if place != len(found):
            return None
        draws = [row.sampler.row_draw(row.num_unread + index) for index in range(len(draft) + 1)]
        found += [draw for draw in draws if draw is not None]
    return found if len(found) == sum(len(draft) + 1 for _, draft, _ in sampling) else None
