"""Types of a request in the engine, one per stage: GenerationRequest (received), EngineStream (open), Row (in the
batch).

`engine.core` moves a request from one type to the next. A stream has a Row, the state of one sequence, for each choice.
A Row turns sampled tokens into events, and decides their text, stop strings and finish reason. Owned by the engine's
thread.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property
from typing import NewType, Protocol

from baton.errors import InvalidArgumentError
from baton.modeling.checkpoints.registry import ModelConfig
from baton.modeling.forward.sampling import SamplerState
from baton.process.crash_notes import NUM_WATCHED_TOKENS, fingerprint
from baton.sampling_params import SamplingParams
from baton.text.stop_strings import StopStrings
from baton.text.stream import TextStream
from baton.text.token_masks import ChoiceMasks
from baton.text.tokenizer import Tokenizer
from baton.types import DraftRound, FinishReason, LeaseRef, RequestId, SampledToken, SlotId, TokenEvent, TokenRange
from generate_workers.slots.leases import BatchSlot

StreamId = NewType("StreamId", int)
"""Number that `GenerationEngine.submit` gave a stream; unique within one engine."""
EventSink = Callable[[TokenEvent], None]
"""Receiver of a stream's events. It is called on the engine's thread and must neither block nor raise."""


@dataclass(frozen=True)
class GenerationRequest:
    """A client's request to a generation group."""

    request_id: RequestId
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    """Output tokens that the request already has from earlier attempts. Empty at the first attempt, and always with
    several choices."""
    params: SamplingParams
    lease_ref: LeaseRef | None = None
    """Lease of the slot to which the KV of all tokens, or of the first ones, is pushed. None: prefill locally."""

    @property
    def num_tokens(self) -> int:
        """Return the number of known tokens: those of the prompt and of the known output."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def capacity_tokens(self) -> int:
        """Return the largest number of tokens that a sequence of this request may have, prompt and output."""
        return len(self.prompt_ids) + self.params.max_tokens

    @cached_property
    def fingerprint(self) -> bytes:
        """Return the fingerprint by which a crash note names the request."""
        return fingerprint(self.request_id, self.prompt_ids)

    @property
    def wants_prompt_scores(self) -> bool:
        """Return whether the prompt's logprobs are to be sent. They are sent with the first output token."""
        return self.params.prompt_logprobs is not None and not self.output_ids

    def check(self, vocab_size: int, max_slot_tokens: int, num_slots: int) -> None:
        """Raise InvalidArgumentError, naming the field, if a field is out of its limits."""
        if not self.prompt_ids:
            raise InvalidArgumentError("prompt_ids is empty: send at least one token")
        for name in ("prompt_ids", "output_ids"):
            largest = max(getattr(self, name), default=0)
            if largest >= vocab_size:
                raise InvalidArgumentError(f"{name} holds {largest}: the model's token ids end at {vocab_size - 1}")
        self._check_lengths(max_slot_tokens)
        if self.params.n > num_slots:
            raise InvalidArgumentError(f"n = {self.params.n} is out of range: this group has {num_slots} slots")
        if self.params.n > 1 and self.output_ids:
            raise InvalidArgumentError("output_ids with several choices: these share only the prompt")
        if self.wants_prompt_scores and self.lease_ref is not None:
            raise InvalidArgumentError(
                "prompt_logprobs with a lease is not supported: the prefill worker scores the prompt, leave it out"
            )

    def _check_lengths(self, max_slot_tokens: int) -> None:
        max_tokens = self.params.max_tokens
        if len(self.output_ids) >= max_tokens:
            raise InvalidArgumentError(
                f"output_ids holds {len(self.output_ids)} tokens already: max_tokens is {max_tokens}, nothing is left"
            )
        if len(self.prompt_ids) + max_tokens > max_slot_tokens:
            raise InvalidArgumentError(
                f"max_tokens = {max_tokens} after a prompt of {len(self.prompt_ids)} tokens is out of range: a slot "
                f"holds at most {max_slot_tokens} tokens"
            )


class RowEndHook(Protocol):
    """Receiver of one stream's sequences that have ended. Called on the engine's thread; must neither block nor
    raise."""

    def take_row(self, row: "Row") -> bool:
        """Take over an ended sequence's slot and return True; the hook then releases it by `SlotTable.release`. Return
        False to have the slot freed at once."""
        ...

    def stream_ended(self) -> None:
        """Record that the stream has sent its last event: `take_row` is not called any more."""
        ...


@dataclass(eq=False)
class EngineStream:
    """An open request. Each of its choices gets exactly one terminal event. Owned by the engine's thread, except that
    any thread may read the first six fields, which do not change."""

    stream_id: StreamId
    request: GenerationRequest
    on_event: EventSink
    stop: StopStrings
    """The request's stop strings, shared by all of its choices."""
    hook: RowEndHook | None = None
    """Receiver of the stream's sequences that have ended. None: their slots are freed at once."""
    masks: Future[list[ChoiceMasks]] | None = None
    """Token masks of each choice, for constrained output; None otherwise. The future is done when the engine receives
    the stream, unless the stream is being ended."""
    rows: "list[Row]" = field(default_factory=list)
    """Rows of the choices that have not ended; empty before the stream has its slots."""
    has_rows: bool = False
    """True once the stream has got its slots, also after it has ended."""

    @property
    def is_over(self) -> bool:
        """Return whether all choices have ended. Valid only if `has_rows`."""
        return not self.rows

    @property
    def failure(self) -> BaseException | None:
        """Return the error of preparing the token masks; None if there was none, or they are not ready yet."""
        return None if self.masks is None or not self.masks.done() else self.masks.exception()

    def tell_ended(self) -> None:
        """Notify the hook, if one is set, that the stream has sent its last event."""
        if self.hook is not None:
            self.hook.stream_ended()

    def open_choices(self) -> list[tuple[int, int]]:
        """Return `(choice, number of output tokens so far)` of each choice that has not ended."""
        if self.has_rows:
            return [(row.choice, row.sampler.position) for row in self.rows]
        return [(choice, len(self.request.output_ids)) for choice in range(self.request.params.n)]


class Row:
    """State of one sequence of the batch, which is one choice of a stream. Its sampler and text are rebuilt from the
    known tokens, so that a resumed stream continues."""

    def __init__(
        self, stream: EngineStream, choice: int, batch_slot: BatchSlot, tokenizer: Tokenizer, config: ModelConfig
    ) -> None:
        request = stream.request
        params = request.params.of_choice(choice)
        self.stream = stream
        self.choice = choice
        self.batch_slot: BatchSlot | None = batch_slot
        """The sequence's slot; None while it is preempted."""
        self.first = batch_slot.first
        """First token, if another group sampled it and sent it with the KV; else None."""
        self.capacity_tokens = len(batch_slot.row.tokens)
        self.token_ids = [*request.prompt_ids, *request.output_ids]
        """All known tokens of the sequence, prompt and output."""
        self.num_cached = batch_slot.num_cached
        """Number of leading tokens whose KV is in place."""
        masks = None if stream.masks is None else stream.masks.result()[choice]
        self.sampler = SamplerState(
            params, request.prompt_ids, request.output_ids, eos_token_ids=config.eos_token_ids, masks=masks
        )
        self.followers: list[Row] = []
        """Rows of the stream's other choices, until they have a copy of this Row's KV and join the batch."""
        self._prompt = [SampledToken(request.prompt_ids[0])] if request.wants_prompt_scores and choice == 0 else []
        """Prompt tokens scored so far; empty if this Row does not have to score the prompt."""
        self._text = TextStream.rebuild(tokenizer, stream.stop, request.prompt_ids, request.output_ids)
        self._vocab_size = config.vocab_size
        self._max_tokens = min(self.capacity_tokens, config.max_position)

    @property
    def ref(self) -> LeaseRef:
        """Return the sequence's claim on its slot. The sequence must not be preempted."""
        assert self.batch_slot is not None
        return self.batch_slot.ref

    @property
    def slot(self) -> SlotId:
        """Return the number of the slot, which identifies the sequence in the batch. The sequence must not be
        preempted."""
        return self.ref.slot

    @property
    def num_known(self) -> int:
        """Return the number of known tokens, prompt and output."""
        return len(self.token_ids)

    @property
    def num_output(self) -> int:
        """Return the number of known output tokens."""
        return self.sampler.position

    @property
    def is_watched(self) -> bool:
        """Return whether a crash note must name the request, because this choice has not ended and has got few tokens
        in this engine."""
        num_new = self.num_output - len(self.stream.request.output_ids)
        return self in self.stream.rows and num_new < NUM_WATCHED_TOKENS

    @property
    def num_left(self) -> int:
        """Return the maximum number of remaining output tokens, as limited by max_tokens and by the slot."""
        return min(self.sampler.params.max_tokens - self.sampler.position, self._max_tokens - self.num_known + 1)

    @property
    def age(self) -> tuple[StreamId, int]:
        """Return the sort key of sequences by age; the oldest sequence has the smallest key."""
        return self.stream.stream_id, self.choice

    def unscored(self, tokens: TokenRange) -> TokenRange:
        """Return the positions among `tokens` whose successor is a prompt token that is not scored yet."""
        if not self._prompt:
            return TokenRange(tokens.start, tokens.start)
        start = max(tokens.start, len(self._prompt) - 1)  # earlier tokens were scored before a preemption
        return TokenRange(start, max(min(tokens.end, len(self.stream.request.prompt_ids) - 1), start))

    def add_scores(self, tokens: Sequence[SampledToken]) -> None:
        self._prompt.extend(tokens)

    def accept(
        self, token: SampledToken, unix_ns: int, drafts: DraftRound | None = None, *, goes_on: bool = False
    ) -> TokenEvent:
        """Append the next output token and return its event. The event has a finish reason if the choice ends with this
        token. `drafts`: result of the drafts that the step verified. `goes_on`: the step has another token for this
        sequence; unless the choice ends, the event then does not include `drafts`. Raises InvalidArgumentError for a
        token outside the model's vocabulary."""
        if not 0 <= token.token_id < self._vocab_size:
            raise InvalidArgumentError(f"token {token.token_id} is not in the model's vocabulary of {self._vocab_size}")
        index = self.sampler.position
        self.token_ids.append(token.token_id)
        self.sampler.append(token.token_id)
        text, finish = self._advance_text(token.token_id, self._finish_by_token())
        prompt, self._prompt = tuple(self._prompt), []
        verified = None if goes_on and finish is None else drafts
        return TokenEvent(index, token, text, unix_ns, finish, choice=self.choice, prompt=prompt, drafts=verified)

    def _finish_by_token(self) -> FinishReason | None:
        finish = self.sampler.finish_after_last()
        if finish is None and len(self.token_ids) > self._max_tokens:  # this token's KV does not fit into the slot
            return FinishReason.LENGTH
        return finish

    def _advance_text(self, token_id: int, finish: FinishReason | None) -> tuple[str, FinishReason | None]:
        if finish is FinishReason.STOP and not self.stream.stop.is_included:  # omit the stop token's text
            return self._text.flush(), finish
        result = self._text.push(token_id)
        if result.stopped:
            return result.text, FinishReason.STOP
        return result.text + (self._text.flush() if finish else ""), finish
