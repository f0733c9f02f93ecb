"""Bodies of POST /v1/responses, with the names and defaults of OpenAI's API. Unknown fields are ignored."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from baton.limits import MAX_INCLUDED, MAX_ITEMS, MAX_METADATA, MAX_TOOLS
from gateway.bodies import Function, Parts, SamplingBody, at_most


class Item(BaseModel):
    """Item of a conversation: a message, a function call, the result of a function call, or reasoning."""

    model_config = ConfigDict(extra="ignore")

    type: str = "message"
    id: str | None = None
    """Unique id of the item, which is used to page through lists of items."""
    status: Literal["in_progress", "completed", "incomplete"] | None = None
    role: str | None = None
    content: str | Parts | None = None
    call_id: str | None = None
    """Id that connects a function call with the item that has its result."""
    name: str | None = None
    arguments: str | None = None
    output: str | Parts | None = None
    """Result of the called function."""


class FunctionTool(Function):
    """A function that the model may call."""

    type: Literal["function"]


class NamedFunction(BaseModel):
    """Value of `tool_choice` that names the function which the model must call."""

    type: Literal["function"]
    name: str


class TextFormat(BaseModel):
    """Required format of the answer's text."""

    model_config = ConfigDict(extra="allow")

    type: str = "text"


class TextConfig(BaseModel):
    """Options for the text of the answer."""

    model_config = ConfigDict(extra="ignore")

    format: TextFormat | None = None


class ReasoningConfig(BaseModel):
    """Options for the model's reasoning."""

    model_config = ConfigDict(extra="ignore")

    effort: str | None = None
    summary: str | None = None


class ResponsesBody(SamplingBody):
    """Body of POST /v1/responses."""

    input: Annotated[str | Annotated[list[Item], Field(max_length=MAX_ITEMS, fail_fast=True)], at_most(MAX_ITEMS)]
    """Text of the user's message, or a list of the next items of the conversation."""
    instructions: str | None = None
    """System message for this response only. It is not used for later responses that continue the conversation."""
    previous_response_id: str | None = None
    """Id of the stored response whose conversation this request continues. None: a new conversation."""
    store: bool | None = None
    """If false, the response is not stored. None means true."""
    max_output_tokens: int | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    include: Annotated[list[str], Field(max_length=MAX_INCLUDED, fail_fast=True)] | None = None
    """Additional content of the response. `message.output_text.logprobs` requests logprobs."""
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    metadata: Annotated[dict[str, str] | None, at_most(MAX_METADATA)] = None
    """Arbitrary pairs of names and texts that are stored with the response and returned in it."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Additional variables for the model's chat template, such as `enable_thinking`."""
    reasoning: ReasoningConfig | None = None
    """Accepted and returned in the response. The model's chat template decides on reasoning."""
