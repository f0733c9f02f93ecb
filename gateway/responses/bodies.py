"""Bodies of POST /v1/responses, with the names and defaults of OpenAI's API; unknown fields are ignored."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from baton.limits import MAX_INCLUDED, MAX_ITEMS, MAX_METADATA, MAX_TOOLS
from gateway.bodies import Function, Parts, SamplingBody, at_most


class Item(BaseModel):
    """An item of a conversation: a message, a call of a function, its answer, or reasoning."""

    model_config = ConfigDict(extra="ignore")

    type: str = "message"
    id: str | None = None
    """Name of the item, by which lists are paged."""
    status: Literal["in_progress", "completed", "incomplete"] | None = None
    role: str | None = None
    content: str | Parts | None = None
    call_id: str | None = None
    """Name of the call, in the call itself and in its answer."""
    name: str | None = None
    arguments: str | None = None
    output: str | Parts | None = None
    """Answer of the function that was called."""


class FunctionTool(Function):
    """A function that the model may call."""

    type: Literal["function"]


class NamedFunction(BaseModel):
    """The function that the model must call."""

    type: Literal["function"]
    name: str


class TextFormat(BaseModel):
    """The form of the answer's text."""

    model_config = ConfigDict(extra="allow")

    type: str = "text"


class TextConfig(BaseModel):
    """Format options of the answer's text."""

    model_config = ConfigDict(extra="ignore")

    format: TextFormat | None = None


class ResponsesBody(SamplingBody):
    """Body of POST /v1/responses."""

    input: Annotated[str | Annotated[list[Item], Field(max_length=MAX_ITEMS, fail_fast=True)], at_most(MAX_ITEMS)]
    """The user's message, or the conversation's next items."""
    instructions: str | None = None
    """System message of this response only. A response that continues from it has its own."""
    previous_response_id: str | None = None
    """Id of the kept response whose conversation is continued."""
    store: bool | None = None
    """False: the response is not kept. By default it is kept."""
    max_output_tokens: int | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    include: Annotated[list[str], Field(max_length=MAX_INCLUDED, fail_fast=True)] | None = None
    """Further content of the response. `message.output_text.logprobs` requests logprobs."""
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    metadata: Annotated[dict[str, str] | None, at_most(MAX_METADATA)] = None
    """Kept with the response, and sent back."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables of the model's chat template, such as enable_thinking."""
    truncation: Literal["auto", "disabled"] | None = None
    background: bool | None = None
    conversation: str | dict[str, Any] | None = None
    prompt: dict[str, Any] | None = None
