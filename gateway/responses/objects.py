"""Makes the objects of the Responses API: the response itself, and its output items."""

from dataclasses import dataclass, field
from typing import Any, Self

from pydantic_core import to_json

from baton.errors import InvalidArgumentError
from baton.limits import MAX_REPEATED_BYTES
from baton.results.completion import Usage
from gateway.answers import Object
from gateway.responses.bodies import ReasoningConfig, ResponsesBody


@dataclass
class OutputItem:
    """Output item that is being written: reasoning, a message, or a function call."""

    kind: str
    id: str
    text: str = ""
    """Text of the message or the reasoning, or the arguments of the function call."""
    call_id: str = ""
    name: str = ""
    logprobs: list[Object] = field(default_factory=list)

    def object(self, status: str) -> Object:
        """Return the item as an object of the API. An item in progress has no content."""
        common: Object = {"id": self.id, "type": self.kind, "status": status}
        is_open = status == "in_progress"
        if self.kind == "function_call":
            arguments = "" if is_open else self.text
            return common | {"call_id": self.call_id, "name": self.name, "arguments": arguments}
        content = [] if is_open else [self.part()]
        if self.kind == "reasoning":
            return common | {"summary": [], "content": content}
        return common | {"role": "assistant", "content": content}

    def part(self, *, is_empty: bool = False) -> Object:
        """Return the only content part of the item. If `is_empty` is true, the part has no text yet."""
        text = "" if is_empty else self.text
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        logprobs = [] if is_empty else self.logprobs
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


@dataclass(frozen=True)
class ResponseHead:
    """Data that all objects of one response share."""

    common: Object
    """Fields of the response object. Each object replaces some of them."""
    num_bytes: int
    """Number of bytes of `common` as JSON."""

    @classmethod
    def of(cls, id_: str, created: int, model: str, body: ResponsesBody) -> Self:
        """Return the head of the response to a body. `created` is the time at which the response was begun, in seconds
        since 1970 (UTC). Raises InvalidArgumentError for a body with too many bytes in the fields that the response
        repeats."""
        common = {
            "id": id_,
            "object": "response",
            "created_at": created,
            "status": "in_progress",
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": model,
            "output": [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": (body.reasoning or ReasoningConfig()).model_dump(),
            "store": body.store is not False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": {"type": "text"} if body.text is None else _format(body)},
            "tool_choice": "auto" if body.tool_choice is None else _dumped(body.tool_choice),
            "tools": [each.model_dump() | {"strict": False} for each in body.tools or ()],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": body.user,
        }
        if (number := len(to_json(common))) > MAX_REPEATED_BYTES:  # fails if it cannot be written
            raise InvalidArgumentError(
                f"instructions, metadata, text, tools and user have {number} bytes: the limit is {MAX_REPEATED_BYTES}, "
                "because the response repeats them; shorten them"
            )
        return cls(common, number)

    def object(self, status: str, output: list[Object], **more: Any) -> Object:
        """Return the response object with this status and output. `more` has further fields, which replace the
        defaults."""
        return self.common | {"status": status, "output": output} | more


def usage_of(found: Usage | None, num_reasoning_tokens: int) -> Object | None:
    """Return the `usage` object of a response. Return None if `found` is None."""
    if found is None:
        return None
    return {
        "input_tokens": found.num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": found.num_cached_tokens, "cache_write_tokens": 0},
        "output_tokens": found.num_output_tokens,
        "output_tokens_details": {"reasoning_tokens": num_reasoning_tokens},
        "total_tokens": found.num_prompt_tokens + found.num_output_tokens,
    }


def _format(body: ResponsesBody) -> Object:
    assert body.text is not None
    return {"type": "text"} if body.text.format is None else body.text.format.model_dump()


def _dumped(choice: Any) -> Any:
    return choice if isinstance(choice, str) else choice.model_dump()
