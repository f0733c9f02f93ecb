"""Types of a request in the engine, one for each stage: GenerationRequest (received), EngineStream (open), Row (in the
batch).

`engine.core` converts a request from one type to the next. A stream has one Row for each choice, which is the state of
one sequence. A Row converts sampled tokens to events, and determines their text, stop strings and finish reason. Owned
by the engine's thread.
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
from baton.text.core_tokenizer import CoreTokenizer
from baton.text.stop_strings import StopStrings
from baton.text.stream import TextStream
from baton.text.token_masks import ChoiceMasks
from baton.types import DraftRound, FinishReason, LeaseRef, RequestId, SampledToken, SlotId, TokenEvent, TokenRange
from generate_workers.slots.leases import BatchSlot

StreamId = NewType("StreamId", int)
"""Id of a stream, which `GenerationEngine.submit` returns. Unique within one engine."""
EventSink = Callable[[TokenEvent], None]
"""Function that receives a stream's events. It is called on the engine's thread, and must neither block nor raise."""


@dataclass(frozen=True)
class GenerationRequest:
    """Request of a client, as an engine receives it."""

    request_id: RequestId
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    """Output tokens that the client already got from earlier attempts at this request. Empty at the first attempt, and
    always empty for requests with several choices."""
    params: SamplingParams
    lease_ref: LeaseRef | None = None
    """Lease on the slot to which another worker sends KV, either of all tokens or only of the first tokens. None: the
    engine prefills the prompt itself."""

    @property
    def num_tokens(self) -> int:
        """Number of known tokens: the prompt, and the output of earlier attempts."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def capacity_tokens(self) -> int:
        """Maximum number of tokens of one sequence of this request, prompt and output together."""
        return len(self.prompt_ids) + self.params.max_tokens

    @cached_property
    def fingerprint(self) -> bytes:
        """Hash of the request's id and prompt. It identifies the request in a crash note (a file that is read after a
        crash)."""
        return fingerprint(self.request_id, self.prompt_ids)

    @property
    def wants_prompt_scores(self) -> bool:
        """True if the logprobs of the prompt must be sent. They are sent with the first output token."""
        return self.params.prompt_logprobs is not None and not self.output_ids

    def check(self, vocab_size: int, max_slot_tokens: int, num_slots: int) -> None:
        """Raise InvalidArgumentError if a field is out of its limits. The error's text names the field."""
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
    """Interface of an object that is notified when sequences of one stream end. Its methods are called on the engine's
    thread, and must neither block nor raise."""

    def take_row(self, row: "Row") -> bool:
        """Called when a sequence has ended. Return True to take over its slot; the hook must later release the slot
        with `SlotTable.release`. Return False to let the engine free the slot at once."""
        ...

    def stream_ended(self) -> None:
        """Called when the stream has sent its last event. `take_row` is not called afterwards."""
        ...


@dataclass(eq=False)
class EngineStream:
    """Open request in the engine. Each of its choices gets exactly one last event. Owned by the engine's thread. Any
    thread may read the fields before `rows`, which do not change."""

    stream_id: StreamId
    request: GenerationRequest
    on_event: EventSink
    stop: StopStrings
    """The request's stop strings, shared by all of its choices."""
    hook: RowEndHook | None = None
    """Object that is notified when sequences of the stream end, and may take over their slots. None: the slots are
    freed at once."""
    masks: Future[list[ChoiceMasks]] | None = None
    """Token masks of each choice, for constrained output. None if the output is not constrained. The future is always
    done when the engine receives the stream, except for a stream that the engine receives only in order to end it."""
    rows: "list[Row]" = field(default_factory=list)
    """Sequences of the choices that have not ended. Empty until the stream has got its slots."""
    has_rows: bool = False
    """True if the stream has got its slots. Stays True after the stream has ended."""

    @property
    def is_over(self) -> bool:
        """True if all choices have ended. Valid only if `has_rows` is True."""
        return not self.rows

    @property
    def failure(self) -> BaseException | None:
        """Error that occurred while the token masks were prepared. None if there was no error, or if the masks are not
        ready yet."""
        return None if self.masks is None or not self.masks.done() else self.masks.exception()

    def tell_ended(self) -> None:
        """Notify the stream's hook, if there is one, that the last event was sent."""
        if self.hook is not None:
            self.hook.stream_ended()

    def open_choices(self) -> list[tuple[int, int]]:
        """Return a pair (choice, number of output tokens so far) for each choice that has not ended."""
        if self.has_rows:
            return [(row.choice, row.sampler.position) for row in self.rows]
        return [(choice, len(self.request.output_ids)) for choice in range(self.request.params.n)]


class Row:
    """State of one sequence, which is one choice of a stream. If an earlier attempt has produced output, the states of
    the sampler and the detokenizer are computed again from the known tokens."""

    def __init__(
        self, stream: EngineStream, choice: int, batch_slot: BatchSlot, tokenizer: CoreTokenizer, config: ModelConfig
    ) -> None:
        request = stream.request
        params = request.params.of_choice(choice)
        self.stream = stream
        self.choice = choice
        self.batch_slot: BatchSlot | None = batch_slot
        """Slot of the sequence. None while the sequence is preempted."""
        self.first = batch_slot.first
        """First output token, if the prefill group sampled it and sent it with the KV. Otherwise None."""
        self.capacity_tokens = len(batch_slot.row.tokens)
        self.token_ids = [*request.prompt_ids, *request.output_ids]
        """All tokens of the sequence that the host has read, prompt and output."""
        self.num_cached = batch_slot.num_cached
        """Number of the sequence's first tokens whose KV is complete."""
        masks = None if stream.masks is None else stream.masks.result()[choice]
        self.num_unread = 0
        """Number of output tokens that launched steps sample, and that the host has not read yet."""
        self.sampler = SamplerState(
            params, request.prompt_ids, request.output_ids, eos_token_ids=config.eos_token_ids, masks=masks
        )
        self.followers: list[Row] = []
        """Sequences of the stream's other choices. They wait until this sequence's KV was copied to them, and then join
        the batch."""
        self._prompt = [SampledToken(request.prompt_ids[0])] if request.wants_prompt_scores and choice == 0 else []
        """Prompt tokens with the logprobs that were computed so far. Empty if this sequence does not have to compute
        them."""
        self._text = TextStream.rebuild(tokenizer, stream.stop, request.prompt_ids, request.output_ids)
        self._vocab_size = config.vocab_size
        self._max_tokens = min(self.capacity_tokens, config.max_position)

    @property
    def ref(self) -> LeaseRef:
        """Reference to the lease by which the sequence holds its slot. Not valid while the sequence is preempted."""
        assert self.batch_slot is not None
        return self.batch_slot.ref

    @property
    def slot(self) -> SlotId:
        """Number of the sequence's slot, which also identifies the sequence in the batch. Not valid while the sequence
        is preempted."""
        return self.ref.slot

    @property
    def num_known(self) -> int:
        """Number of known tokens, prompt and output together. Unread tokens are included."""
        return len(self.token_ids) + self.num_unread

    @property
    def num_output(self) -> int:
        """Number of output tokens that the host has read, including tokens of earlier attempts."""
        return self.sampler.position

    @property
    def is_watched(self) -> bool:
        """True if the request must be written to the crash note (a file that is read after a crash): the choice has not
        ended, and has received fewer than NUM_WATCHED_TOKENS tokens from this engine."""
        num_new = self.num_output - len(self.stream.request.output_ids)
        return self in self.stream.rows and num_new < NUM_WATCHED_TOKENS

    @property
    def num_left(self) -> int:
        """Maximum number of further output tokens, after the unread ones. The limits are `max_tokens` and the size of
        the slot."""
        num_output = self.sampler.position + self.num_unread
        return min(self.sampler.params.max_tokens - num_output, self._max_tokens - self.num_known + 1)

    @property
    def age(self) -> tuple[StreamId, int]:
        """Sort key of sequences by age. The oldest sequence has the smallest key."""
        return self.stream.stream_id, self.choice

    def unscored(self, tokens: TokenRange) -> TokenRange:
        """Return the positions in `tokens` for which the logprob of the following prompt token must still be computed.
        The range is empty if prompt logprobs were not requested."""
        if not self._prompt:
            return TokenRange(tokens.start, tokens.start)
        start = max(tokens.start, len(self._prompt) - 1)  # earlier tokens were scored before a preemption
        return TokenRange(start, max(min(tokens.end, len(self.stream.request.prompt_ids) - 1), start))

    def add_scores(self, tokens: Sequence[SampledToken]) -> None:
        self._prompt.extend(tokens)

    def accept(
        self, token: SampledToken, unix_ns: int, drafts: DraftRound | None = None, *, goes_on: bool = False
    ) -> TokenEvent:
        """Append the next output token and return its event. If the choice ends with this token, the event has a finish
        reason.

        `drafts` is the result of the drafts that the step verified. `goes_on` is True if the step has further tokens
        for this sequence; the event then has `drafts` only if the choice ends. Raises InvalidArgumentError for a token
        that is not in the model's vocabulary.
        """
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
