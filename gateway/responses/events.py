"""Writes a response as the sequence of events that the OpenAI API defines. Each response needs its own writer.

The last event contains the whole response. If the client requested no stream, it gets this response, so that streamed
and whole responses have the same content.
"""

import uuid
from collections.abc import Callable, Iterator

from baton.results.completion import Usage
from baton.types import FinishReason, TokenEvent
from gateway.answers import Object, scored_token
from gateway.parsing.output import OutputRules
from gateway.parsing.pieces import Arguments, CallBegun, Piece, Reasoning, Text
from gateway.responses.objects import OutputItem, ResponseHead, usage_of

_PREFIXES = {"message": "msg_", "reasoning": "rs_", "function_call": "fc_"}
_STEMS = {"message": "response.output_text", "reasoning": "response.reasoning_text"}


class ResponseEvents:
    """Writer of the events of one response."""

    def __init__(
        self, head: ResponseHead, rules: OutputRules, token_text: Callable[[int], str], *, has_logprobs: bool
    ) -> None:
        self.output: list[Object] = []
        """Output items that are complete."""
        self._head = head
        self._parser = rules.parser()
        self._is_calls_alone = rules.format is not None and rules.format.is_all
        self._token_text = token_text
        self._has_logprobs = has_logprobs
        self._item: OutputItem | None = None
        self._logprobs: list[Object] = []  # of tokens whose text has not been sent yet
        self._num_events = 0
        self._num_reasoning_tokens = 0
        self._finish: FinishReason | None = None

    def begin(self) -> Iterator[Object]:
        """Yield the events at the start of a response, before the first token."""
        for name in ("created", "in_progress"):
            yield self._event(f"response.{name}", response=self._head.object("in_progress", []))

    def take(self, event: TokenEvent) -> Iterator[Object]:
        """Yield the events of the response that result from one token event."""
        if event.token is not None and self._has_logprobs:
            self._logprobs.append(scored_token(event.token, self._token_text))
        pieces = list(self._parser.push(event.text, None if event.token is None else event.token.token_id))
        self._num_reasoning_tokens += any(isinstance(piece, Reasoning) for piece in pieces)
        if event.finish is not None:
            self._finish = event.finish
            pieces += self._parser.end()
        for piece in pieces:
            yield from self._write(piece)

    def end(self, usage: Usage | None) -> Iterator[Object]:
        """Yield the events after the last token. The last of them contains the whole response."""
        is_cut = self._finish is FinishReason.LENGTH
        status = "incomplete" if is_cut else "completed"
        if self._item is None and not self.output and not self._is_calls_alone:
            yield from self._open("message")
        yield from self._close(status)
        response = self._head.object(
            status,
            self.output,
            usage=usage_of(usage, self._num_reasoning_tokens),
            incomplete_details={"reason": "max_output_tokens"} if is_cut else None,
        )
        yield self._event(f"response.{status}", response=response)

    def fail(self, message: str) -> Iterator[Object]:
        """Yield the last event of a response that ended with an error. `message` is the error's text."""
        output = self.output if self._item is None else [*self.output, self._item.object("incomplete")]
        error = {"code": "server_error", "message": message}
        yield self._event("response.failed", response=self._head.object("failed", output, error=error))

    def _write(self, piece: Piece) -> Iterator[Object]:
        match piece:
            case Text():
                yield from self._add("message", piece.text)
            case Reasoning():
                yield from self._add("reasoning", piece.text)
            case CallBegun():
                yield from self._open("function_call", piece.id, piece.name)
            case Arguments():
                yield from self._add("function_call", piece.text)

    def _add(self, kind: str, text: str) -> Iterator[Object]:
        if self._item is None or self._item.kind != kind:
            yield from self._open(kind)
        item = self._item
        assert item is not None
        item.text += text
        if kind == "function_call":
            yield self._event("response.function_call_arguments.delta", delta=text, **self._place())
            return
        more: Object = {"content_index": 0}
        if kind == "message":
            more["logprobs"], self._logprobs = self._logprobs, []
            item.logprobs += more["logprobs"]
        yield self._event(f"{_STEMS[kind]}.delta", delta=text, **self._place(), **more)

    def _open(self, kind: str, call_id: str = "", name: str = "") -> Iterator[Object]:
        yield from self._close("completed")
        self._item = item = OutputItem(kind, _PREFIXES[kind] + uuid.uuid4().hex, call_id=call_id, name=name)
        added = {"item": item.object("in_progress"), "output_index": len(self.output)}
        yield self._event("response.output_item.added", **added)
        if kind != "function_call":
            part = item.part(is_empty=True)
            yield self._event("response.content_part.added", part=part, content_index=0, **self._place())

    def _close(self, status: str) -> Iterator[Object]:
        """Yield the end of the item that is being written, if there is one."""
        item = self._item
        if item is None:
            return
        place = self._place()
        if item.kind == "function_call":
            done: Object = {"arguments": item.text, "name": item.name}
            yield self._event("response.function_call_arguments.done", **done, **place)
        else:
            more: Object = {"logprobs": item.logprobs} if item.kind == "message" else {}
            yield self._event(f"{_STEMS[item.kind]}.done", text=item.text, content_index=0, **more, **place)
            yield self._event("response.content_part.done", part=item.part(), content_index=0, **place)
        written = item.object(status)
        yield self._event("response.output_item.done", item=written, output_index=len(self.output))
        self.output = [*self.output, written]
        self._item = None

    def _place(self) -> Object:
        assert self._item is not None
        return {"item_id": self._item.id, "output_index": len(self.output)}

    def _event(self, kind: str, **fields: object) -> Object:
        self._num_events += 1
        return {"type": kind, "sequence_number": self._num_events - 1, **fields}
