"""Bodies of HTTP requests, with the names, defaults and limits of OpenAI's API.

Some fields of vLLM and other inference servers, and Baton's field `priority`, are also supported. Unknown fields are
ignored, because some clients send the same fields to servers of several kinds. Requests with fields of
`gateway.fields.unsupported` are refused.
"""

from collections.abc import Sized
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, WithJsonSchema

from baton.limits import (
    MAX_CACHE_SALT_CHARS,
    MAX_FORM_CHOICES,
    MAX_FUNCTION_NAME_CHARS,
    MAX_LOGIT_BIASES,
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_PROMPTS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    MAX_TOOLS,
    MAX_VALUES,
)

T = TypeVar("T")


def at_most(most: int) -> BeforeValidator:
    """Return a validator for maps and lists with at most `most` entries. It runs before the entries themselves are
    validated. It does not limit the length of text."""

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
"""Type of one prompt or several prompts, each as text or as token ids."""


class StreamOptions(BaseModel):
    """Options for the additional content of a stream."""

    include_usage: bool = False
    """If true, the last chunk of the stream reports the request's usage."""


class SamplingBody(BaseModel):
    """Fields that the bodies of chats and completions have in common."""

    model_config = ConfigDict(extra="allow")

    model: str = ""
    """Name of the model. Empty: the served model is used."""
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
    """Seed for sampling. Any integer is accepted, and reduced modulo 2^64."""
    user: str | None = None
    """Accepted and ignored. Callers are identified by their API keys."""
    top_k: int | None = None
    """Number of most likely tokens from which a token is sampled. None, 0 or -1: all tokens."""
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_STOP_TOKEN_IDS, fail_fast=True)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    response_format: dict[str, Any] | None = None
    """Required form of the output: `text`, `json_object`, or `json_schema` with a schema."""
    structured_outputs: dict[str, Any] | None = None
    """Required form of the output, with one of the keys json, json_object, regex, grammar and choice. The older names
    of this field are `guided_json`, `guided_regex`, `guided_grammar` and `guided_choice`."""
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_grammar: str | None = None
    guided_choice: Annotated[list[str], Field(max_length=MAX_FORM_CHOICES, fail_fast=True)] | None = None
    priority: Literal["interactive", "standard", "batch"] | None = None
    """Priority of the request in the queue. None means standard."""
    cache_salt: str | None = Field(default=None, min_length=1, max_length=MAX_CACHE_SALT_CHARS)
    """Text that limits the use of the prefix cache: only requests with the same salt share cached KV."""


class CompletionBody(SamplingBody):
    """Body of POST /v1/completions."""

    prompt: PromptField
    """One prompt or several, as text or as token ids."""
    max_tokens: int | None = 16
    logprobs: int | None = None
    """Number of most likely tokens to report at each position, with their logprobs, in addition to the token's own
    logprob. None: no logprobs."""
    echo: bool | None = None
    best_of: int | None = None
    """Only 1 and the value of `n` are accepted: all generated choices are returned, so no best one remains to
    select."""


class Part(BaseModel):
    """Part of a message's content: a text or, in a message of the assistant, a refusal. Other parts are not
    supported."""

    model_config = ConfigDict(extra="ignore")

    type: str
    text: str | None = None
    refusal: str | None = None


Parts = Annotated[list[Part], Field(max_length=MAX_PARTS, fail_fast=True)]


class CalledFunction(BaseModel):
    """Name of a called function, with its arguments."""

    name: str
    arguments: str = "{}"
    """Arguments as the text of a JSON object, as the model wrote them."""


class ToolCall(BaseModel):
    """Tool call in a message of the assistant."""

    model_config = ConfigDict(extra="ignore")

    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(BaseModel):
    """Message of a chat."""

    model_config = ConfigDict(extra="ignore")

    role: str
    content: str | Parts | None = None
    refusal: str | None = None
    """Refusal that the assistant wrote. It is used as the content if the message has no content."""
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    """Tool calls that the assistant made in this message."""
    tool_call_id: str | None = None
    """Id of the tool call that this message answers. Used only in messages of role `tool`."""
    name: str | None = None
    reasoning_content: str | None = None
    """Reasoning of the assistant before this message, for chat templates that use it."""


Messages = Annotated[list[Message], Field(max_length=MAX_MESSAGES, fail_fast=True)]


class Function(BaseModel):
    """Description of a function that the model may call."""

    model_config = ConfigDict(extra="ignore")

    name: str = Field(min_length=1, max_length=MAX_FUNCTION_NAME_CHARS, pattern=r"^[a-zA-Z0-9_.-]+$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON schema of the function's arguments, which is shown to the model. The arguments that the model writes are
    constrained to the schema only if a call is required."""


class Tool(BaseModel):
    """Tool that the model may call. Only functions are supported."""

    type: Literal["function"]
    function: Function


Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)]


class FunctionName(BaseModel):
    """Name of a function, as an object with the field `name`."""

    name: str


class NamedTool(BaseModel):
    """Value of `tool_choice` that names the tool which the model must call."""

    type: Literal["function"]
    function: FunctionName


ToolChoice = Literal["none", "auto", "required"] | NamedTool


class ChatBody(SamplingBody):
    """Body of POST /v1/chat/completions."""

    messages: Messages
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    """Maximum number of output tokens. None: the rest of the model's context. `max_tokens` is the older name of this
    field."""
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    """If false, only the first tool call of an answer is returned. None means true."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Additional variables for the model's chat template, such as `enable_thinking`."""
    add_generation_prompt: bool | None = None
    """If true, the prompt ends with the start of a new assistant message. None: true, unless `continue_final_message`
    is true."""
    continue_final_message: bool | None = None
    """If true, the output continues the text of the last message. None means false."""


class TokenizeBody(BaseModel):
    """Body of POST /tokenize. It contains a text (`prompt`) or a chat (`messages`), which the model's chat template
    renders."""

    model_config = ConfigDict(extra="allow")

    model: str = ""
    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class DetokenizeBody(BaseModel):
    """Body of POST /detokenize."""

    model_config = ConfigDict(extra="ignore")

    model: str = ""
    tokens: Annotated[list[int], Field(max_length=MAX_VALUES, fail_fast=True)]
