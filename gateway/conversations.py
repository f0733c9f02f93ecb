"""Renders chats with tools for one model, and returns the rules for parsing the model's output. Any thread may use this
module.

Most models have a chat template that describes the tools to the model. SmolLM2's template does not support tools. For
this model, the system message describes them, with the text that it was trained on (`gateway.tools.prompt`).
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from baton.errors import InvalidArgumentError
from baton.limits import MAX_PROMPT_BYTES, MAX_TEMPLATE_VALUES
from baton.text.tokenizer import Ending, Tokenizer
from gateway.bodies import Message, Part, Tool, ToolCall
from gateway.errors import ContextTooLongError
from gateway.parsing.call_formats import OBLIGED, CallFormat, format_of
from gateway.parsing.output import OutputRules
from gateway.parsing.reasoning import BEGIN, END
from gateway.parsing.strict_json import read_json
from gateway.tools.prompt import prompted

_SHORT_ID = re.compile(r"[a-zA-Z0-9]{9}")
_TEXT_PARTS = ("text", "input_text", "output_text")
"""Types of content parts that contain text, in chats and in OpenAI's responses."""
_NO_PARAMETERS = {"type": "object", "properties": {}}


class ChatRenderer:
    """Renders chats for one model. It does not change after it is made."""

    def __init__(self, tokenizer: Tokenizer, tool_format: str = "auto") -> None:
        """Make a renderer. `tool_format` is the name of a format of tool calls in `gateway.parsing.call_formats`, or
        "auto" for the format that belongs to the model's chat template. Raises ConfigError for an unknown name."""
        self._tokenizer = tokenizer
        template = tokenizer.chat_template(for_tools=True)
        self.format = format_of(template, tool_format)
        """Format in which the model writes tool calls. None: the model cannot call tools."""
        self._has_reasoning = BEGIN in template
        self._of_reasoning = tokenizer.silent_tokens((BEGIN, END))
        self._of_calls = tokenizer.silent_tokens(self.format.markers if self.format else ())

    @property
    def _has_short_ids(self) -> bool:
        return self.format is not None and self.format.has_short_ids

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        options: Mapping[str, Any],
        ending: Ending = Ending.TURN,
    ) -> str:
        """Return the chat as text. `options` are additional variables for the chat template. `ending` selects how the
        text ends, for example with the start of the assistant's message. Raises InvalidArgumentError for content that
        the model's chat template does not accept, and ContextTooLongError for more text than a prompt may have."""
        if tools and self.format is None:
            raise InvalidArgumentError(
                "tools: the model's chat template takes none: leave them out, or start the gateway with --tool-format"
            )
        chat = messages_of(messages, self.format)
        described = [_described(tool) for tool in tools]
        for field, value in (("messages", chat), ("tools", described), ("chat_template_kwargs", options)):
            _TemplateBudget(field).take(value)
        if self.format is not None and self.format.is_prompted:
            return self._tokenizer.render_chat(prompted(chat, described), options=options, ending=ending)
        return self._tokenizer.render_chat(chat, described or None, options, ending)

    def rules(
        self,
        rendered: str,
        tools: Sequence[Tool],
        *,
        continued: str = "",
        most_calls: int | None = None,
        is_obliged: bool = False,
    ) -> OutputRules:
        """Return the rules for parsing the model's output. `rendered` is the chat as text. `continued` is the text of
        the last message if the output continues it, and empty otherwise. `most_calls` is the maximum number of tool
        calls to return; None: no limit. `is_obliged` is true if the output must be a list of tool calls
        (`gateway.tools.choice.obliged_form`)."""
        names = frozenset(tool.function.name for tool in tools)
        if is_obliged:
            return OutputRules(replace(OBLIGED, has_short_ids=self._has_short_ids), names, most_calls)
        return OutputRules(
            self.format if tools else None,
            names,
            most_calls,
            has_reasoning=self._has_reasoning,
            is_reasoning_open=rendered.rstrip().endswith(BEGIN) or BEGIN in continued.rpartition(END)[2],
            markers=self._of_reasoning | (self._of_calls if tools else {}),
        )


def messages_of(messages: Sequence[Message], format_: CallFormat | None) -> list[dict[str, Any]]:
    """Convert messages to the form that chat templates use. The role `developer` becomes `system`, the parts of a
    message's content are joined by line breaks, and arguments of tool calls become objects. `format_` is the format of
    the model's tool calls; None: the model cannot call tools. Raises InvalidArgumentError for parts that are not text,
    and for tool calls if `format_` is None. Raises ContextTooLongError for calls with more text than a prompt may
    have."""
    room = _TemplateBudget("messages")
    return [_message(f"messages[{index}]", each, format_, room) for index, each in enumerate(messages)]


class _TemplateBudget:
    """Number of values and bytes of text that a field may still pass on to a template."""

    def __init__(self, field: str) -> None:
        self._field = field
        self._num_values, self._num_bytes = MAX_TEMPLATE_VALUES, MAX_PROMPT_BYTES

    def take(self, value: object) -> None:
        """Count the values within `value`, and the bytes of its texts. Raises InvalidArgumentError if the field has too
        many values, and ContextTooLongError if it has too many bytes."""
        waiting = [value]
        while waiting:
            each = waiting.pop()
            inside: Sequence[object] = each if isinstance(each, list) else ()
            if isinstance(each, Mapping):
                inside = [*each.values()]
                self._take_text(*each)
            elif isinstance(each, str):
                self._take_text(each)
            waiting += inside
            self._num_values -= len(inside)
            if self._num_values < 0:
                raise InvalidArgumentError(f"{self._field} holds over {MAX_TEMPLATE_VALUES} values: send fewer")

    def _take_text(self, *texts: str) -> None:
        self._num_bytes -= sum(map(num_bytes, texts))
        if self._num_bytes < 0:
            raise ContextTooLongError(
                f"{self._field} has more than {MAX_PROMPT_BYTES} bytes, the prompt is too long: shorten it"
            )


def num_bytes(text: str) -> int:
    """Return the number of bytes of a text in UTF-8."""
    return len(text) if text.isascii() else len(text.encode(errors="surrogatepass"))


def text_of(where: str, content: str | Sequence[Part]) -> str:
    """Return the content of a message as text. Parts are joined by line breaks. Raises InvalidArgumentError for a part
    that is not text. `where` is the name of the content in the error's text."""
    if isinstance(content, str):
        return content
    texts = []
    for part in content:
        text = part.refusal if part.type == "refusal" else part.text if part.type in _TEXT_PARTS else None
        if text is None:
            raise InvalidArgumentError(f"{where} has a part of type {part.type!r:.40}: send text")
        texts.append(text)
    return "\n".join(texts)


def _message(where: str, message: Message, format_: CallFormat | None, room: _TemplateBudget) -> dict[str, Any]:
    role = "system" if message.role == "developer" else message.role
    content = text_of(f"{where}.content", message.refusal or "" if message.content is None else message.content)
    made: dict[str, Any] = {"role": role, "content": content}
    if (message.tool_calls or role == "tool") and format_ is None:
        raise InvalidArgumentError(f"{where}: the model's chat template takes no tools: send text alone")
    is_short = format_ is not None and format_.has_short_ids
    if message.tool_calls:
        made["tool_calls"] = [
            _call(f"{where}.tool_calls[{index}]", call, room, is_short=is_short)
            for index, call in enumerate(message.tool_calls)
        ]
    if role == "tool":
        if not message.tool_call_id:
            raise InvalidArgumentError(f"{where}.tool_call_id is missing: name the call that it answers")
        made["tool_call_id"] = _id(message.tool_call_id, is_short=is_short)
        made |= {"name": message.name} if message.name else {}
    if message.reasoning_content:
        made["reasoning_content"] = message.reasoning_content
    return made


def _call(where: str, call: ToolCall, room: _TemplateBudget, *, is_short: bool) -> dict[str, Any]:
    arguments = read_json((call.function.arguments or "{}").encode(), f"{where}.function.arguments")
    if not isinstance(arguments, dict):
        raise InvalidArgumentError(f"{where}.function.arguments is not an object: send one, as the model wrote it")
    room.take(arguments)
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": _id(call.id, is_short=is_short), "type": "function", "function": function}


def _id(given: str, *, is_short: bool) -> str:
    """Return a call's id in the form that the template accepts. Equal ids stay equal."""
    if not is_short or _SHORT_ID.fullmatch(given):
        return given
    return hashlib.blake2b(given.encode(errors="replace"), digest_size=5).hexdigest()[:9]


def _described(tool: Tool) -> dict[str, Any]:
    """Return a tool in the form for chat templates."""
    function = {"name": tool.function.name, "description": tool.function.description}
    given = {name: value for name, value in function.items() if value is not None}
    return {"type": "function", "function": given | {"parameters": tool.function.parameters or _NO_PARAMETERS}}
