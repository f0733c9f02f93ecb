"""Converts the body of a request for a response, together with the earlier conversation, to the body of a chat
request."""

from collections.abc import Sequence
from typing import Any

from baton.errors import InvalidArgumentError
from gateway.bodies import (
    CalledFunction,
    ChatBody,
    Function,
    FunctionName,
    Message,
    NamedTool,
    Part,
    SamplingBody,
    Tool,
    ToolCall,
)
from gateway.conversations import text_of
from gateway.errors import FieldNames, UnsupportedFieldError
from gateway.fields.structured import form_names
from gateway.fields.unsupported import REFUSED, refuse_unsupported
from gateway.responses.bodies import Item, NamedFunction, ResponsesBody
from gateway.tools.choice import parameter_names

LOGPROBS = "message.output_text.logprobs"
_NAMES = {
    "logprobs": "top_logprobs",
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "prompt_ids": "input",
    "response_format.json_schema": "text.format",
    "response_format.type": "text.format.type",
    "token_ids": "input",
}
"""Names of fields in the Responses API. The key is the name that Baton's errors use for the field, from a chat request
or from Baton's own API."""
_PLACES = (
    ("response_format.json_schema", "text.format"),
    ("response_format", "text.format"),
    ("function.parameters", "parameters"),
)
"""Pairs of field paths: the path in a chat's body, and the corresponding path in a response's body."""


def items_of(body: ResponsesBody) -> list[Item]:
    """Return the new items that the body adds to the conversation. If the input is a text, it becomes one message of
    the user."""
    return [Item(role="user", content=body.input)] if isinstance(body.input, str) else body.input


def chat_of(body: ResponsesBody, items: Sequence[Item]) -> ChatBody:
    """Return the body of a chat that corresponds to the body of a response. `items` are all items of the conversation,
    old and new. Raises InvalidArgumentError for values that are wrong or not supported."""
    refuse_unsupported(body, adds_special_tokens=False)
    if body.response_format:
        raise UnsupportedFieldError("response_format is not supported: use text.format; leave it out")
    if body.n not in (None, 1):
        raise InvalidArgumentError("n is not supported: a response is one answer; send the request again for another")
    messages = messages_of(items)
    if body.instructions:
        messages = [Message(role="system", content=body.instructions), *messages]
    has_logprobs = LOGPROBS in (body.include or ())
    common = {name: getattr(body, name) for name in SamplingBody.model_fields} | {"response_format": _format(body)}
    return ChatBody(
        **common,
        messages=messages,
        max_completion_tokens=body.max_output_tokens,
        logprobs=has_logprobs,
        top_logprobs=body.top_logprobs if has_logprobs else None,
        tools=[_tool(each) for each in body.tools or ()] or None,
        tool_choice=_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        chat_template_kwargs=body.chat_template_kwargs,
    )


def response_names(body: ResponsesBody) -> FieldNames:
    """Return the client's names of the fields of a request to the Responses API, for use in error messages."""
    tools, choice = [_tool(each) for each in body.tools or ()], _choice(body.tool_choice)
    form = parameter_names(tools, choice) or form_names(body)
    for of_chat, own in _PLACES:
        form = {ours: theirs.replace(of_chat, own) for ours, theirs in form.items()}
    return FieldNames({*ResponsesBody.model_fields, *REFUSED}, _NAMES | form)


def messages_of(items: Sequence[Item]) -> list[Message]:
    """Convert the items of a conversation to the messages of a chat. Successive reasoning, text and function calls of
    the assistant become one message. Raises InvalidArgumentError for an item that is unknown or incomplete."""
    messages: list[Message] = []
    for index, item in enumerate(items):
        read = _READERS.get(item.type)
        if read is None:
            known = ", ".join(_READERS)
            raise InvalidArgumentError(f"input[{index}].type = {item.type!r:.40} is not supported: use {known}")
        found = read(f"input[{index}]", item)
        last = messages[-1] if messages else None
        if last is not None and _belongs(last, found):
            _merge(last, found)
        else:
            messages.append(found)
    return messages


def _belongs(last: Message, found: Message) -> bool:
    """Return whether a message of the assistant continues the one before it."""
    if last.role != "assistant" or found.role != "assistant":
        return False
    return bool(found.tool_calls) or (last.content is None and not last.tool_calls)


def _merge(last: Message, found: Message) -> None:
    last.content = found.content if last.content is None else last.content
    last.tool_calls = [*(last.tool_calls or ()), *(found.tool_calls or ())] or None


def _message(where: str, item: Item) -> Message:
    if not item.role:
        raise InvalidArgumentError(f"{where}.role is missing: use user, assistant, system or developer")
    if item.content is None:
        raise InvalidArgumentError(f"{where}.content is missing: send text")
    return Message(role=item.role, content=text_of(f"{where}.content", item.content))


def _call(where: str, item: Item) -> Message:
    if not item.call_id or not item.name:
        raise InvalidArgumentError(f"{where} lacks call_id or name: send the call as it was received")
    function = CalledFunction(name=item.name, arguments=item.arguments or "{}")
    return Message(role="assistant", tool_calls=[ToolCall(id=item.call_id, function=function)])


def _call_output(where: str, item: Item) -> Message:
    if not item.call_id or item.output is None:
        raise InvalidArgumentError(f"{where} lacks call_id or output: name the call and send its answer")
    return Message(role="tool", tool_call_id=item.call_id, content=text_of(f"{where}.output", item.output))


def _reasoning(where: str, item: Item) -> Message:
    parts = item.content if isinstance(item.content, list) else [Part(type="text", text=item.content or "")]
    return Message(role="assistant", reasoning_content="".join(part.text or "" for part in parts) or None)


_READERS = {
    "message": _message,
    "function_call": _call,
    "function_call_output": _call_output,
    "reasoning": _reasoning,
}


def _tool(given: Function) -> Tool:
    values = {name: getattr(given, name) for name in Function.model_fields}
    return Tool(type="function", function=Function(**values))


def _choice(given: str | NamedFunction | None) -> Any:
    if isinstance(given, NamedFunction):
        return NamedTool(type="function", function=FunctionName(name=given.name))
    return given


def _format(body: ResponsesBody) -> dict[str, Any] | None:
    """Return the form of the text in the format of chats, in which the schema is in a separate object."""
    format_ = None if body.text is None else body.text.format
    if format_ is None:
        return None
    given = format_.model_dump()
    kind = given.pop("type")
    return {"type": kind, kind: given} if kind == "json_schema" else {"type": kind}
