"""Bodies of requests, with the names, defaults and limits of OpenAI's API.

In addition, some fields of vLLM and other inference servers are supported, and the field `priority`. Unknown fields are
ignored, as clients of many servers expect, except the fields in `gateway.fields.unsupported`, which are refused.
"""

from collections.abc import Sized
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, WithJsonSchema

from baton.limits import (
    MAX_FORM_CHOICES,
    MAX_LOGIT_BIASES,
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_PROMPTS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    MAX_TOOLS,
)

T = TypeVar("T")


def at_most(most: int) -> BeforeValidator:
    """Return a validator that refuses a map or list of more than `most` entries before its entries are checked. Texts
    of any length pass."""

    def check(value: T) -> T:
        if isinstance(value, Sized) and not isinstance(value, str) and len(value) > most:
            raise ValueError(f"has {len(value)} entries: use at most {most}")
        return value

    return BeforeValidator(check)


def _prompt(value: object) -> object:
    """Return one prompt or several. Checked without pydantic, which is slow for a list of a million token ids."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        kinds = set(map(type, value))
        if kinds <= {int} or kinds <= {str}:
            return value
        if kinds == {list} and len(value) <= MAX_PROMPTS and all(set(map(type, each)) <= {int} for each in value):
            return value
    raise ValueError(f"is neither text nor token ids, nor a list of at most {MAX_PROMPTS} of either")


_IDS: dict[str, Any] = {"type": "array", "items": {"type": "integer"}}
_PROMPT: dict[str, Any] = {
    "anyOf": [
        {"type": "string"},
        _IDS,
        {"type": "array", "items": {"type": "string"}, "maxItems": MAX_PROMPTS},
        {"type": "array", "items": _IDS, "maxItems": MAX_PROMPTS},
    ]
}
PromptField = Annotated[str | list[int] | list[str] | list[list[int]], PlainValidator(_prompt), WithJsonSchema(_PROMPT)]
"""One prompt or several, as text or as token ids."""


class StreamOptions(BaseModel):
    """Options for the content of a stream in addition to its tokens."""

    include_usage: bool = False
    """True: the stream sends a chunk with the request's usage before its end."""


class SamplingBody(BaseModel):
    """Fields that both kinds of request have in common."""

    model_config = ConfigDict(extra="allow")

    model: str = ""
    """Name of the served model; empty: any model."""
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | Annotated[list[str], Field(max_length=MAX_STOP_STRINGS, fail_fast=True)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[int, float] | None, at_most(MAX_LOGIT_BIASES)] = None
    seed: int | None = None
    """Any integer; it is reduced modulo 2^64."""
    user: str | None = None
    """Accepted and not used: callers are identified by their keys."""
    top_k: int | None = None
    """Number of most likely tokens from which a token is sampled; 0 or -1: all tokens."""
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_STOP_TOKEN_IDS, fail_fast=True)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    response_format: dict[str, Any] | None = None
    """Form of the output: text, json_object, or json_schema with its schema."""
    structured_outputs: dict[str, Any] | None = None
    """Form of the output, given by one of json, json_object, regex, grammar and choice. `guided_json`, `guided_regex`
    and so on are older names."""
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_grammar: str | None = None
    guided_choice: Annotated[list[str], Field(max_length=MAX_FORM_CHOICES, fail_fast=True)] | None = None
    priority: Literal["interactive", "standard", "batch"] | None = None
    """Priority of the request while it waits."""
    cache_salt: str | None = Field(default=None, min_length=1, max_length=256)
    """Only requests with the same salt use each other's cached KV."""


class CompletionBody(SamplingBody):
    """Body of POST /v1/completions."""

    prompt: PromptField
    """One prompt or several, as text or as token ids."""
    max_tokens: int | None = 16
    logprobs: int | None = None
    """Number of most likely tokens that are reported with each token."""
    echo: bool | None = None
    best_of: int | None = None
    """Accepted if it is 1 or `n`: all choices are returned."""


class Part(BaseModel):
    """A part of a message's content. Only text and the assistant's refusals are supported."""

    model_config = ConfigDict(extra="ignore")

    type: str
    text: str | None = None
    refusal: str | None = None


Parts = Annotated[list[Part], Field(max_length=MAX_PARTS, fail_fast=True)]


class CalledFunction(BaseModel):
    """The called function and its arguments."""

    name: str
    arguments: str = "{}"
    """Arguments as a JSON object, as the model wrote it."""


class ToolCall(BaseModel):
    """A tool call in an answer of the assistant."""

    model_config = ConfigDict(extra="ignore")

    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(BaseModel):
    """A turn of a chat."""

    model_config = ConfigDict(extra="ignore")

    role: str
    content: str | Parts | None = None
    refusal: str | None = None
    """Refusal of the assistant, used as the content of a message without content."""
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    """Tool calls in an answer of the assistant."""
    tool_call_id: str | None = None
    """In a message of role `tool`: id of the call that the message answers."""
    name: str | None = None
    reasoning_content: str | None = None
    """Reasoning in an answer of the assistant, for chat templates that use it."""


Messages = Annotated[list[Message], Field(max_length=MAX_MESSAGES, fail_fast=True)]


class Function(BaseModel):
    """A function that the model may call."""

    model_config = ConfigDict(extra="ignore")

    name: str = Field(min_length=1, max_length=64, pattern=r"^[a-zA-Z0-9_.-]+$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON schema of the arguments. It is shown to the model, and not enforced."""


class Tool(BaseModel):
    """A tool: a function."""

    type: Literal["function"]
    function: Function


Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)]


class FunctionName(BaseModel):
    """The name of a function."""

    name: str


class NamedTool(BaseModel):
    """The tool that the model must call."""

    type: Literal["function"]
    function: FunctionName


ToolChoice = Literal["none", "auto", "required"] | NamedTool


class ChatBody(SamplingBody):
    """Body of POST /v1/chat/completions."""

    messages: Messages
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    """Maximum number of output tokens; without it, the model's remaining context. `max_tokens` is the former name."""
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    """False: only the first call of an answer is returned."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables of the model's chat template, such as enable_thinking."""
    add_generation_prompt: bool | None = None
    """True: the prompt ends with the beginning of the assistant's turn. Default: true, unless the last message is
    continued."""
    continue_final_message: bool | None = None
    """True: the answer continues the text of the last message."""


class TokenizeBody(BaseModel):
    """Body of POST /tokenize: a text, or a chat as its template renders it."""

    model_config = ConfigDict(extra="allow")

    model: str = ""
    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class DetokenizeBody(BaseModel):
    """Body of POST /detokenize."""

    model_config = ConfigDict(extra="ignore")

    model: str = ""
    tokens: Annotated[list[int], Field(max_length=2**19, fail_fast=True)]
