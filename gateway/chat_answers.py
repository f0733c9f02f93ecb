"""Writes answers to chats whose output may also contain reasoning or tool calls. The functions have no side effects."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field

from baton.results.completion import Usage
from baton.types import FinishReason, SampledToken, TokenEvent
from gateway.answers import FINISHES, Chats, Head, Object, line, usage_of
from gateway.parsing.output import OutputParser, OutputRules
from gateway.parsing.pieces import Arguments, CallBegun, Piece, Reasoning, Text


class ParsedChats(Chats):
    """Writer of the answer to a chat, which separates reasoning and tool calls from text. It collects the output of all
    choices as their events arrive."""

    def __init__(self, head: Head, rules: OutputRules) -> None:
        super().__init__(head)
        self._parsers: defaultdict[int, OutputParser] = defaultdict(rules.parser)
        self._gathered: defaultdict[int, Gathered] = defaultdict(Gathered)

    def lines(self, prompt: int, event: TokenEvent) -> bytes:
        """Return the chunks that result from one event of a prompt's stream, as server-sent events. `prompt` is the
        index of the prompt in the request."""
        return b"".join(map(line, self.chunks(prompt, event)))

    def chunks(self, prompt: int, event: TokenEvent) -> Iterator[Object]:
        """Yield the chunks that result from one event of a prompt's stream. `prompt` is the index of the prompt in the
        request."""
        number = self.head.number(prompt, event.choice)
        if number not in self._parsers:
            yield self._chunk(self._first(prompt, number))
        logprobs = self._logprobs(prompt, event)
        for piece in self._take(number, event):
            yield self._chunk(_choice(number, _delta_of(piece), logprobs))
            logprobs = None
        if event.finish is not None or logprobs is not None:
            yield self._chunk(_choice(number, {}, logprobs, self._finish(number)))

    def take(self, prompt: int, event: TokenEvent) -> None:
        """Collect one event of a prompt's stream. `gathered` later makes the whole answer from the collected events."""
        for _ in self._take(self.head.number(prompt, event.choice), event):
            pass

    def gathered(self, found: Sequence[Usage]) -> Object:
        """Return the whole answer, made from the events that were passed to `take`. `found` has the usage of each
        prompt."""
        choices = [self._gathered_choice(number) for number in sorted(self._gathered)]
        return self._object(self.name) | {"choices": choices, "usage": usage_of(found)}

    def _take(self, number: int, event: TokenEvent) -> Iterator[Piece]:
        parser, gathered = self._parsers[number], self._gathered[number]
        for piece in parser.push(event.text, None if event.token is None else event.token.token_id):
            gathered.add(piece)
            yield piece
        if event.token is not None and self.head.has_logprobs:
            gathered.tokens.append(event.token)
        if event.finish is not None:
            gathered.finish = event.finish
            for piece in parser.end():
                gathered.add(piece)
                yield piece

    def _finish(self, number: int) -> str | None:
        finish = FINISHES.get(self._gathered[number].finish)
        return "tool_calls" if finish == "stop" and self._gathered[number].calls else finish

    def _gathered_choice(self, number: int) -> Object:
        found = self._gathered[number]
        message: Object = {"role": "assistant", "content": found.text or None, "refusal": None}
        if found.reasoning:
            message["reasoning_content"] = found.reasoning
        if found.calls:
            message["tool_calls"] = [_called(**asdict(call)) for call in found.calls]
        else:
            message["content"] = found.text
        return {
            "index": number,
            "message": message,
            "logprobs": self._scored(found.tokens),
            "finish_reason": self._finish(number),
        }


def _choice(number: int, delta: Object, logprobs: Object | None, finish: str | None = None) -> Object:
    return {"index": number, "delta": delta, "logprobs": logprobs, "finish_reason": finish}


def _delta_of(piece: Piece) -> Object:
    match piece:
        case Text():
            return {"content": piece.text}
        case Reasoning():
            return {"reasoning_content": piece.text}
        case CallBegun():
            return {"tool_calls": [{"index": piece.number, **_called(piece.id, piece.name, "")}]}
        case Arguments():
            return {"tool_calls": [{"index": piece.number, "function": {"arguments": piece.text}}]}


def _called(id: str, name: str, arguments: str) -> Object:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


@dataclass
class GatheredCall:
    """Tool call with the arguments that were read so far."""

    id: str
    name: str
    arguments: str = ""


@dataclass
class Gathered:
    """Combined output of one choice so far."""

    text: str = ""
    reasoning: str = ""
    calls: list[GatheredCall] = field(default_factory=list)
    tokens: list[SampledToken] = field(default_factory=list)
    finish: FinishReason | None = None

    def add(self, piece: Piece) -> None:
        """Add the next piece of the output."""
        match piece:
            case Text():
                self.text += piece.text
            case Reasoning():
                self.reasoning += piece.text
            case CallBegun():
                self.calls.append(GatheredCall(piece.id, piece.name))
            case Arguments():
                self.calls[piece.number].arguments += piece.text
