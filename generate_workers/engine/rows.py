"""A request in the engine, a type per stage: GenerationRequest as asked, EngineStream once open, Row in the batch.

`engine.core` moves a request from one type to the next. A stream has a row for each choice. A row turns sampled tokens
into events: text, stop strings and the finish reason are decided here, where the token is made. Owned by the engine's
thread.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property
from typing import NewType, Protocol

from baton.errors import InvalidArgumentError
from baton.ids import RequestId, SlotId
from baton.process.crash_notes import NUM_WATCHED_TOKENS, fingerprint
from baton.sampling_params import SamplingParams
from baton.types import DraftRound, FinishReason, LeaseRef, SampledToken, TokenEvent, TokenRange
from generate_workers.slots.leases import Seat
from modeling.checkpoints.registry import ModelConfig
from modeling.forward.sampling import SamplerState
from text.stop_strings import StopStrings
from text.stream import TextStream
from text.token_masks import TokenMasks
from text.tokenizer import Tokenizer

Ticket = NewType("Ticket", int)
"""Number that `GenerationEngine.submit` gave a stream; unique within one engine."""
EventSink = Callable[[TokenEvent], None]
"""Receiver of a stream's events; called on the engine's thread, must neither block nor raise."""


@dataclass(frozen=True)
class GenerationRequest:
    """What a client asks of a generation group."""

    request_id: RequestId
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    """Tokens that the request's stream already has; empty at the first attempt, and with several choices."""
    params: SamplingParams
    lease_ref: LeaseRef | None = None
    """Lease of the slot to which the KV of all, or of the first, tokens is pushed. None: prefill locally."""

    @property
    def num_tokens(self) -> int:
        """Return the number of known tokens, prompt and output."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def capacity_tokens(self) -> int:
        """Return how many tokens a row of this request may come to hold."""
        return len(self.prompt_ids) + self.params.max_tokens

    @cached_property
    def fingerprint(self) -> bytes:
        """Return the fingerprint by which a crash note names the request."""
        return fingerprint(self.request_id, self.prompt_ids)

    @property
    def wants_prompt_scores(self) -> bool:
        """Return whether the prompt's logprobs are due; they are sent with the first output token."""
        return self.params.prompt_logprobs is not None and not self.output_ids

    def check(self, vocab_size: int, max_slot_tokens: int, num_slots: int) -> None:
        """Raise InvalidArgumentError that names the first field that is out of its limits."""
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
    """Handles one stream's rows that have their last token. On the engine's thread; must neither block nor raise."""

    def take_row(self, row: "Row") -> bool:
        """Take over an ended row's slot, to release it later (`SlotTable.release`); return False to free it at once."""
        ...

    def stream_ended(self) -> None:
        """Note that the stream has sent its last event, so that none of its rows will follow."""
        ...


@dataclass(eq=False)
class EngineStream:
    """An open request: each of its choices gets exactly one terminal event. Owned by the engine's thread, except the
    first six fields, which do not change."""

    ticket: Ticket
    request: GenerationRequest
    on_event: EventSink
    stop: StopStrings
    """The request's stop strings, shared by all of its choices."""
    hook: RowEndHook | None = None
    """Receiver of its rows that have ended. None: their slots are freed at once."""
    masks: Future[list[TokenMasks]] | None = None
    """The masks of each choice, if the output is constrained; done once the engine has taken the stream."""
    rows: "list[Row]" = field(default_factory=list)
    """Rows of the choices that run, once the stream has its slots."""
    has_rows: bool = False
    """Whether the stream has, or had, its slots."""

    @property
    def is_over(self) -> bool:
        """Return whether no row of the stream is left. Meaningful once it had rows."""
        return not self.rows

    @property
    def failure(self) -> BaseException | None:
        """Return why the output cannot be constrained as asked; None if it can, or is not prepared yet."""
        return None if self.masks is None or not self.masks.done() else self.masks.exception()

    def tell_ended(self) -> None:
        """Tell the hook, if there is one, that the stream has sent its last event."""
        if self.hook is not None:
            self.hook.stream_ended()

    def open_choices(self) -> list[tuple[int, int]]:
        """Return `(choice, output tokens so far)` of each choice that has not ended."""
        if self.has_rows:
            return [(row.choice, row.sampler.position) for row in self.rows]
        return [(choice, len(self.request.output_ids)) for choice in range(self.request.params.n)]


class Row:
    """A choice that holds a slot. Its sampler and text are rebuilt from history, so that a resumed stream goes on."""

    def __init__(
        self, stream: EngineStream, choice: int, seat: Seat, tokenizer: Tokenizer, config: ModelConfig
    ) -> None:
        request = stream.request
        params = request.params.of_choice(choice)
        self.stream = stream
        self.choice = choice
        self.seat: Seat | None = seat
        """The row's slot; None while the row is preempted, its memory given to older rows."""
        self.first = seat.first
        """First token, if it was sampled by another group and came with the KV."""
        self.capacity_tokens = len(seat.row.tokens)
        self.token_ids = [*request.prompt_ids, *request.output_ids]
        """All known tokens of the sequence."""
        self.num_cached = seat.num_cached
        """Tokens whose KV is in place."""
        masks = None if stream.masks is None else stream.masks.result()[choice]
        self.sampler = SamplerState(
            params, request.prompt_ids, request.output_ids, eos_token_ids=config.eos_token_ids, masks=masks
        )
        self.followers: list[Row] = []
        """Rows of the other choices, until they get a copy of this row's KV and a token of their own."""
        self._prompt = [SampledToken(request.prompt_ids[0])] if request.wants_prompt_scores and choice == 0 else []
        """Tokens of the prompt scored so far; empty when scores were not asked for."""
        self._text = TextStream.rebuild(tokenizer, stream.stop, request.prompt_ids, request.output_ids)
        self._vocab_size = config.vocab_size
        self._max_tokens = min(self.capacity_tokens, config.max_position)

    @property
    def ref(self) -> LeaseRef:
        """Return the row's claim on its slot. The row must have a seat."""
        assert self.seat is not None
        return self.seat.ref

    @property
    def slot(self) -> SlotId:
        """Return the slot, by which the batch knows the row. The row must have a seat."""
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
        """Return whether the choice has had so few tokens here that a crash note names it while they are computed."""
        num_new = self.num_output - len(self.stream.request.output_ids)
        return self in self.stream.rows and num_new < NUM_WATCHED_TOKENS

    @property
    def num_left(self) -> int:
        """Return the most output tokens that are still to come, for each of which the slot has room."""
        return min(self.sampler.params.max_tokens - self.sampler.position, self._max_tokens - self.num_known + 1)

    @property
    def age(self) -> tuple[Ticket, int]:
        """Return the key by which rows are ordered from oldest (least) to youngest."""
        return self.stream.ticket, self.choice

    def unscored(self, tokens: TokenRange) -> TokenRange:
        """Return the positions among `tokens` whose next token is of the prompt and not scored yet."""
        if not self._prompt:
            return TokenRange(tokens.start, tokens.start)
        start = max(tokens.start, len(self._prompt) - 1)  # earlier ones were scored before the row was preempted
        return TokenRange(start, max(min(tokens.end, len(self.stream.request.prompt_ids) - 1), start))

    def add_scores(self, tokens: Sequence[SampledToken]) -> None:
        """Add the scores of the prompt's next tokens."""
        self._prompt.extend(tokens)

    def accept(
        self, token: SampledToken, unix_ns: int, drafts: DraftRound | None = None, *, goes_on: bool = False
    ) -> TokenEvent:
        """Take the next output token; return its event, which carries the finish reason if the choice ends with it,
        and, unless the step `goes_on`, the drafts that the step verified. Raises InvalidArgumentError for a token that
        the model does not have."""
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
        if finish is None and len(self.token_ids) > self._max_tokens:  # the slot has no room for this token's KV
            return FinishReason.LENGTH
        return finish

    def _advance_text(self, token_id: int, finish: FinishReason | None) -> tuple[str, FinishReason | None]:
        if finish is FinishReason.STOP and not self.stream.stop.is_included:  # a stop token's text is no output
            return self._text.flush(), finish
        result = self._text.push(token_id)
        if result.stopped:
            return result.text, FinishReason.STOP
        return result.text + (self._text.flush() if finish else ""), finish
