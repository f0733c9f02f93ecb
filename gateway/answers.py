"""Makes the objects of OpenAI's API for answers, from the events of a request. The functions have no side effects.

`Chats` and `Completions` write an answer in two forms: as a whole, or as the chunks of a stream. A choice's number in
the answer is computed from the number of its prompt and its index among the choices of this prompt.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from baton.results.completion import Choice, Completion, Usage
from baton.text.detokenizer import Detokenizer
from baton.text.tokenizer import Tokenizer
from baton.types import FinishReason, SampledToken, TokenEvent
from gateway.reading import Prompt

Object = dict[str, Any]

_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
_TEXT = "text"
"""Placeholder for the text of a chunk. For each choice, one chunk with this text is encoded. The bytes before and after
the text are then reused, because they are the same in all chunks of the choice."""

FINISHES = {None: None, FinishReason.LENGTH: "length", FinishReason.STOP: "stop"}
"""OpenAI's finish reason for each finish reason of Baton. A request that ends in any other way is an error: its stream
raises the error."""


@dataclass(frozen=True)
class Head:
    """Data that all objects of one answer share, such as its id and model."""

    id: str
    created: int
    """Time at which the answer was begun, in seconds since 1970 (UTC)."""
    model: str
    num_choices: int
    """Number of choices of each prompt."""
    tokenizer: Tokenizer
    prompts: Sequence[Prompt]
    has_logprobs: bool = False

    def number(self, prompt: int, choice: int) -> int:
        """Return the number of a choice among all choices of the answer. `prompt` is the prompt's index in the request.
        `choice` is the index among the choices of this prompt."""
        return prompt * self.num_choices + choice


class Writer(ABC):
    """Base class of writers that make one answer of the OpenAI API, as a whole or in chunks."""

    name: ClassVar[str]
    """Value of the field `object` of a whole answer."""
    chunk_name: ClassVar[str]
    """Value of the field `object` of a chunk."""

    def __init__(self, head: Head) -> None:
        self.head = head
        self._begun: set[int] = set()
        """Numbers of the choices of which at least one chunk was written."""
        self._frames: dict[int, tuple[bytes, bytes]] = {}
        """Constant bytes before and after the text in the chunks of a choice, by the number of the choice. Most chunks
        of a choice differ only in their text."""

    def whole(self, found: Sequence[Completion]) -> Object:
        """Return the whole answer. `found` has the completed output of each prompt."""
        choices = [
            self._whole_choice(prompt, completion, choice)
            for prompt, completion in enumerate(found)
            for choice in completion.choices
        ]
        usage = usage_of([each.usage for each in found if each.usage is not None])
        return self._object(self.name) | {"choices": choices, "usage": usage}

    def lines(self, prompt: int, event: TokenEvent) -> bytes:
        """Return the chunks that result from one event of a prompt's stream, as server-sent events. `prompt` is the
        index of the prompt in the request."""
        number = self.head.number(prompt, event.choice)
        has_text_alone = event.text and event.finish is None and not self.head.has_logprobs
        if number not in self._begun or not has_text_alone:
            return b"".join(map(line, self.chunks(prompt, event)))
        if number not in self._frames:
            self._frames[number] = _frame(self._chunk(self._delta(number, _TEXT, None, None)))
        before, after = self._frames[number]
        return before + _ENCODER.encode(event.text).encode() + after

    def chunks(self, prompt: int, event: TokenEvent) -> Iterator[Object]:
        """Yield the chunks that result from one event of a prompt's stream. `prompt` is the index of the prompt in the
        request."""
        number = self.head.number(prompt, event.choice)
        if number not in self._begun:
            self._begun.add(number)
            if (first := self._first(prompt, number)) is not None:
                yield self._chunk(first)
        finish = FINISHES.get(event.finish)
        logprobs = self._logprobs(prompt, event)
        if event.text or logprobs is not None or finish is not None:
            yield self._chunk(self._delta(number, event.text, logprobs, finish))

    def usage_chunk(self, found: Sequence[Usage]) -> Object:
        """Return the chunk that reports the usage. It is the last chunk of a stream, and has no choices."""
        return self._object(self.chunk_name) | {"choices": [], "usage": usage_of(found)}

    def _object(self, name: str) -> Object:
        return {"id": self.head.id, "object": name, "created": self.head.created, "model": self.head.model}

    def _chunk(self, choice: Object) -> Object:
        return self._object(self.chunk_name) | {"choices": [choice]}

    @abstractmethod
    def _whole_choice(self, prompt: int, completion: Completion, choice: Choice) -> Object: ...

    @abstractmethod
    def _first(self, prompt: int, number: int) -> Object | None:
        """Return the chunk that precedes a choice's first text; None if there is none."""

    @abstractmethod
    def _delta(self, number: int, text: str, logprobs: Object | None, finish: str | None) -> Object: ...

    @abstractmethod
    def _logprobs(self, prompt: int, event: TokenEvent) -> Object | None:
        """Return the logprobs in an event of a prompt's stream; None if they are not requested."""


class Chats(Writer):
    """Writer of the answer to a chat request."""

    name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def _whole_choice(self, prompt: int, completion: Completion, choice: Choice) -> Object:
        return {
            "index": self.head.number(prompt, choice.index),
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": self._scored(choice.tokens),
            "finish_reason": FINISHES.get(choice.finish),
        }

    def _first(self, prompt: int, number: int) -> Object:
        delta = {"role": "assistant", "content": ""}
        return {"index": number, "delta": delta, "logprobs": None, "finish_reason": None}

    def _delta(self, number: int, text: str, logprobs: Object | None, finish: str | None) -> Object:
        delta = {"content": text} if text or logprobs is not None else {}
        return {"index": number, "delta": delta, "logprobs": logprobs, "finish_reason": finish}

    def _logprobs(self, prompt: int, event: TokenEvent) -> Object | None:
        return None if event.token is None else self._scored((event.token,))

    def _scored(self, tokens: Sequence[SampledToken]) -> Object | None:
        if not self.head.has_logprobs:
            return None
        return {"content": [scored_token(each, self.head.tokenizer.token_text) for each in tokens], "refusal": None}


class _Offsets:
    """Computes the character offsets at which consecutive tokens begin in a text."""

    def __init__(self, tokenizer: Tokenizer, detokenizer: Detokenizer, start: int) -> None:
        """Start at the character offset `start`, which is the offset of the first token. `detokenizer` converts tokens
        to text."""
        self._tokenizer = tokenizer
        self._detokenizer = detokenizer
        self._next = start

    def take(self, token_id: int) -> tuple[int, str]:
        """Return the character offset of the next token, and the token's own text. If several tokens together form one
        character, all of them have the offset of this character."""
        offset = self._next
        self._next += len(self._detokenizer.push(token_id))
        return offset, self._tokenizer.token_text(token_id)


class _EchoOffsets(_Offsets):
    """Computes the character offsets of a prompt's tokens in the echoed prompt. The echo of token ids contains special
    tokens. The echo of a text contains those that the client wrote, but not those that the tokenizer added."""

    def __init__(self, tokenizer: Tokenizer, echo: str) -> None:
        super().__init__(tokenizer, tokenizer.detokenizer(with_special=True), 0)
        self._echo = echo

    def take(self, token_id: int) -> tuple[int, str]:
        """Return the character offset of the next token, and the token's own text. Special tokens that are not part of
        the echo have no text."""
        offset, own = self._next, self._tokenizer.token_text(token_id)
        text = self._detokenizer.push(token_id)
        found = (each for each in (text, text.removeprefix(" ")) if self._echo.startswith(each, offset))
        echoed = next(found, text if own else "")  # a tokenizer may add a space at the start of a text
        self._next += len(echoed)
        return offset, own or echoed


class Completions(Writer):
    """Writer of the answer to a completion request."""

    name = "text_completion"
    chunk_name = "text_completion"

    def __init__(self, head: Head) -> None:
        super().__init__(head)
        self._offsets: dict[int, _Offsets] = {}
        """Character offsets of the output tokens, by the number of the choice. Empty if logprobs were not requested."""
        self._scored: dict[int, Sequence[SampledToken]] = {}
        """Prompt tokens with their logprobs, by the number of the prompt. They arrive once in the prompt's stream, and
        are used in all of its choices."""

    def _whole_choice(self, prompt: int, completion: Completion, choice: Choice) -> Object:
        number = self.head.number(prompt, choice.index)
        self._scored[prompt] = completion.prompt
        text = self.head.prompts[prompt].echo + choice.text
        return self._delta(number, text, self._scores(prompt, number, choice.tokens), FINISHES.get(choice.finish))

    def _first(self, prompt: int, number: int) -> Object | None:
        echo = self.head.prompts[prompt].echo
        return self._delta(number, echo, None, None) if echo else None

    def _delta(self, number: int, text: str, logprobs: Object | None, finish: str | None) -> Object:
        return {"index": number, "text": text, "logprobs": logprobs, "finish_reason": finish}

    def _logprobs(self, prompt: int, event: TokenEvent) -> Object | None:
        if event.prompt:
            self._scored[prompt] = event.prompt
        tokens = () if event.token is None else (event.token,)
        scores = self._scores(prompt, self.head.number(prompt, event.choice), tokens)
        return scores if scores and scores["tokens"] else None

    def _scores(self, prompt: int, number: int, tokens: Sequence[SampledToken]) -> Object | None:
        """Return the logprobs of a choice's next tokens. The logprobs of the prompt precede those of the choice's first
        token."""
        if not self.head.has_logprobs:
            return None
        scores: Object = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        if number not in self._offsets:
            given = self.head.prompts[prompt]
            self._add(scores, self._scored.get(prompt, ()), _EchoOffsets(self.head.tokenizer, given.echo))
            detokenizer = self.head.tokenizer.detokenizer(given.token_ids)
            self._offsets[number] = _Offsets(self.head.tokenizer, detokenizer, len(given.echo))
        self._add(scores, tokens, self._offsets[number])
        return scores

    def _add(self, scores: Object, tokens: Sequence[SampledToken], offsets: _Offsets) -> None:
        for token in tokens:
            offset, text = offsets.take(token.token_id)
            scores["tokens"].append(text)
            scores["token_logprobs"].append(token.logprob)
            scores["top_logprobs"].append(self._top(token, text))
            scores["text_offset"].append(offset)

    def _top(self, token: SampledToken, text: str) -> dict[str, float] | None:
        """Return the logprobs of the most likely tokens, and of the token itself, by their texts. Of tokens with the
        same text, the most likely counts. Return None for the first token of a prompt."""
        if token.logprob is None:
            return None
        top: dict[str, float] = {}
        for each in token.top:
            top.setdefault(self.head.tokenizer.token_text(each.token_id), each.logprob)
        top.setdefault(text, token.logprob)
        return top


def scored_token(token: SampledToken, text_of: Callable[[int], str]) -> Object:
    """Return OpenAI's object for a token with its logprob and the logprobs of the most likely tokens at its position.
    `text_of` returns the text of a token id."""

    def named(token_id: int, logprob: float | None) -> Object:
        text = text_of(token_id)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    top = [named(each.token_id, each.logprob) for each in token.top]
    return named(token.token_id, token.logprob) | {"top_logprobs": top}


def usage_of(found: Sequence[Usage]) -> Object:
    """Return OpenAI's `usage` object, with the sums of the tokens of all prompts."""
    prompt_tokens = sum(each.num_prompt_tokens for each in found)
    output_tokens = sum(each.num_output_tokens for each in found)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": output_tokens,
        "total_tokens": prompt_tokens + output_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(each.num_cached_tokens for each in found)},
    }


def line(data: Any, event: str = "") -> bytes:
    """Return a server-sent event whose data is `data` as JSON. `event` is the event type; empty: the event has no
    type."""
    named = f"event: {event}\n".encode() if event else b""
    return named + b"data: " + _ENCODER.encode(data).encode() + b"\n\n"


def _frame(chunk: Object) -> tuple[bytes, bytes]:
    """Return the bytes before and after the text in the line of a chunk. The text is searched from the end of the line,
    because earlier fields (the request's id, the model's name) may contain the placeholder."""
    before, _, after = line(chunk).rpartition(_ENCODER.encode(_TEXT).encode())
    return before, after
