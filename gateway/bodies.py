"""Bodies of requests, with the names, defaults and limits of OpenAI's API.

Fields that OpenAI's API does not have are those of vLLM and other servers of the field, and `priority`. Fields that are
unknown are ignored, as clients of many servers expect. Those that are known and not supported are refused by
`gateway.reading`, unless they have the value that asks for nothing.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

MAX_PROMPTS = 64
"""Prompts of one body, at most: each becomes a request of its own."""


class StreamOptions(BaseModel):
    """What a stream holds besides its tokens."""

    include_usage: bool = False
    """Whether a chunk with the request's usage comes before the end."""


class SamplingBody(BaseModel):
    """What both kinds of request have in common."""

    model_config = ConfigDict(extra="ignore")

    model: str = ""
    """Name of the served model; empty: whatever is served."""
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    """Any integer; it counts modulo 2^64."""
    user: str | None = None
    """Accepted and not used: a caller is known by its key."""
    top_k: int | None = None
    """The most likely tokens that are kept; 0 or -1 keeps all."""
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    response_format: dict[str, Any] | None = None
    """Form of the output: text, json_object, or json_schema with its schema."""
    structured_outputs: dict[str, Any] | None = None
    """Form of the output by one of json, json_object, regex, grammar and choice; `guided_json` etc. are old names."""
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_grammar: str | None = None
    guided_choice: list[str] | None = None
    priority: Literal["interactive", "standard", "batch"] | None = None
    """How urgent the request is while it waits."""
    cache_salt: str | None = Field(default=None, min_length=1, max_length=256)
    """Only requests of the same salt use each other's cached KV."""


class CompletionBody(SamplingBody):
    """Body of POST /v1/completions."""

    prompt: str | list[int] | list[str] | list[list[int]]
    """One prompt or several, as text or as token ids."""
    max_tokens: int | None = 16
    logprobs: int | None = None
    """How many of the most likely tokens are reported with each token."""
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None


class Part(BaseModel):
    """A part of a message's content; text alone is supported."""

    model_config = ConfigDict(extra="ignore")

    type: str
    text: str | None = None


class CalledFunction(BaseModel):
    """The function that was called, and with what."""

    name: str
    arguments: str = "{}"
    """Arguments as a JSON object, as the model wrote it."""


class ToolCall(BaseModel):
    """A call of a tool in an answer of the assistant."""

    model_config = ConfigDict(extra="ignore")

    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(BaseModel):
    """A turn of a chat."""

    model_config = ConfigDict(extra="ignore")

    role: str
    content: str | list[Part] | None = None
    tool_calls: list[ToolCall] | None = None
    """Calls in an answer of the assistant."""
    tool_call_id: str | None = None
    """In a message of role `tool`: the call that it answers."""
    name: str | None = None
    reasoning_content: str | None = None
    """Reasoning in an answer of the assistant, for templates that take it."""


class Function(BaseModel):
    """A function that the model may call."""

    model_config = ConfigDict(extra="ignore")

    name: str = Field(min_length=1, max_length=64, pattern=r"^[a-zA-Z0-9_.-]+$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON schema of the arguments; the model is told of it, and nothing enforces it."""


class Tool(BaseModel):
    """A tool: a function."""

    type: Literal["function"]
    function: Function


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

    messages: list[Message]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    """Output tokens, at most; without it, as many as the model has room for. `max_tokens` is its former name."""
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    """False: the first call of an answer alone is returned."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables of the model's chat template, such as enable_thinking."""
    functions: list[Any] | None = None


class TokenizeBody(BaseModel):
    """Body of POST /tokenize: a text, or a chat as its template renders it."""

    model_config = ConfigDict(extra="ignore")

    model: str = ""
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeBody(BaseModel):
    """Body of POST /detokenize."""

    model_config = ConfigDict(extra="ignore")

    model: str = ""
    tokens: list[int] = Field(max_length=2**20)
