"""Converts the bodies of requests to arguments of `baton.AsyncClient.generate`, and to options of the answer.

Prompts are tokenized in the gateway, because their number of tokens is needed: a chat without a limit on its output may
fill the rest of the model's context. Tokenizing a long prompt takes long, so the functions are called in a thread.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from baton.errors import InvalidArgumentError, NotFoundError
from baton.limits import MAX_PROMPT_BYTES, MAX_PROMPTS
from baton.results.completion import ModelInfo
from baton.sampling_params import SamplingOptions
from baton.text.tokenizer import Ending, Tokenizer
from gateway.bodies import ChatBody, CompletionBody, Message, SamplingBody, TokenizeBody, Tool
from gateway.conversations import ChatRenderer, num_bytes, text_of
from gateway.errors import ContextTooLongError
from gateway.fields.structured import structured_of
from gateway.fields.unsupported import refuse_unsupported
from gateway.parsing.output import PLAIN, OutputRules
from gateway.tools.choice import obliged_form, offered

_OPTIONS = (
    "n", "temperature", "top_p", "presence_penalty", "frequency_penalty", "logit_bias", "min_p", "repetition_penalty",
    "min_tokens", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos",
)  # fmt: skip
"""Fields that have the same name and meaning in bodies and in sampling options."""


@dataclass(frozen=True)
class Prompt:
    """One prompt of a request, as token ids."""

    token_ids: Sequence[int]
    echo: str = ""
    """Text that is put before the generated text of each choice. Empty unless the request has `echo`."""


@dataclass(frozen=True)
class Asked:
    """Content of a request's body after validation and tokenization."""

    prompts: tuple[Prompt, ...]
    options: tuple[SamplingOptions, ...]
    """Sampling options of each prompt, in the order of `prompts`."""
    model: str
    num_choices: int
    """Number of choices to generate for each prompt."""
    priority: str = "standard"
    cache_salt: str = ""
    is_streamed: bool = False
    includes_usage: bool = False
    """True if a stream must end with a chunk that reports the usage."""
    logprobs: int | None = None
    """Number of most likely tokens to report at each position, with their logprobs, in addition to the token's own
    logprob. None: no logprobs."""
    output: OutputRules = PLAIN
    """Rules for parsing the output into reasoning, text and tool calls."""


class Reader:
    """Converts bodies of requests for one model. Any thread may use it."""

    def __init__(self, tokenizer: Tokenizer, model: ModelInfo, tool_format: str = "auto") -> None:
        """Make a reader. `tool_format` is the name of a format of tool calls in `gateway.parsing.call_formats`, or
        "auto" for the format that belongs to the model's chat template. Raises ConfigError for an unknown name."""
        self.tokenizer = tokenizer
        self.model = model
        self._renderer = ChatRenderer(tokenizer, tool_format)

    def completion(self, body: CompletionBody) -> Asked:
        """Convert the body of a completion. Raises InvalidArgumentError for fields that are wrong or not supported, and
        NotFoundError if the body names a model that is not served."""
        refuse_unsupported(body, adds_special_tokens=True)
        if body.best_of not in (None, 1, body.n):
            raise InvalidArgumentError("best_of is not supported: all choices are returned; leave it out")
        prompts = self._prompts(body)
        options = _sampling(body) | SamplingOptions(logprobs=body.logprobs)
        if body.max_tokens is not None:
            options["max_tokens"] = body.max_tokens
        if body.echo and (body.logprobs is not None or body.max_tokens == 0):
            options["prompt_logprobs"] = body.logprobs or 0
        return self._asked(body, prompts, options, body.logprobs)

    def chat(self, body: ChatBody) -> Asked:
        """Convert the body of a chat. Raises InvalidArgumentError for fields that are wrong or not supported, and
        NotFoundError if the body names a model that is not served."""
        refuse_unsupported(body, adds_special_tokens=False)
        if body.top_logprobs is not None and not body.logprobs:
            raise InvalidArgumentError("top_logprobs needs logprobs = true: set both, or neither")
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        tools = offered(body.tools, body.tool_choice)
        rendered = self._rendered(body, body.messages, tools)
        prompt = Prompt(self._encoded("messages", rendered, self.tokenizer.encode_rendered))
        most_calls = 1 if body.parallel_tool_calls is False else None
        form = obliged_form(tools, body.tool_choice, most_calls=most_calls)
        continued = text_of("messages", body.messages[-1].content or "") if _ending(body) is Ending.OPEN else ""
        rules = self._renderer.rules(
            rendered, tools, continued=continued, most_calls=most_calls, is_obliged=form is not None
        )
        options = _sampling(body) | SamplingOptions(logprobs=logprobs)
        if form is not None:
            if "structured_output" in options:
                raise InvalidArgumentError("tool_choice obliges to a call: leave it out, or what forms the answer")
            options["structured_output"] = form
        most = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
        if most is not None:
            options["max_tokens"] = most
        return replace(self._asked(body, (prompt,), options, logprobs), output=rules)

    def tokenize(self, body: TokenizeBody) -> list[int]:
        """Return the token ids of a text or a chat. They are the same as those of a request with this text or chat.
        Raises InvalidArgumentError for a wrong body, and NotFoundError if the body names another model."""
        self.check_model(body.model)
        refuse_unsupported(body, adds_special_tokens=body.prompt is not None)
        if body.prompt is not None and body.messages is None:
            return self._encoded("prompt", body.prompt, self.tokenizer.encode)
        if body.prompt is None and body.messages is not None:
            tools = offered(body.tools, body.tool_choice)
            rendered = self._rendered(body, body.messages, tools)
            return self._encoded("messages", rendered, self.tokenizer.encode_rendered)
        raise InvalidArgumentError("prompt and messages: give one of them")

    def check_model(self, name: str) -> None:
        """Raise NotFoundError unless `name` is the name of the served model. An empty name is accepted."""
        if name and name != self.model.name:
            raise NotFoundError(f"model {name!r:.100} is not served: use {self.model.name}")

    def _asked(
        self, body: SamplingBody, prompts: tuple[Prompt, ...], options: SamplingOptions, logprobs: int | None
    ) -> Asked:
        self.check_model(body.model)
        for prompt in prompts:
            self._check_fits("messages" if isinstance(body, ChatBody) else "prompt", len(prompt.token_ids))
        return Asked(
            prompts,
            tuple(self._with_room(options, prompt) for prompt in prompts),
            self.model.name,  # token ids mean nothing to another model
            options.get("n", 1),
            body.priority or "standard",
            body.cache_salt or "",
            is_streamed=bool(body.stream),
            includes_usage=body.stream_options is not None and body.stream_options.include_usage,
            logprobs=logprobs,
        )

    def _rendered(self, body: ChatBody | TokenizeBody, messages: Sequence[Message], tools: Sequence[Tool]) -> str:
        """Return a chat rendered by its template. A chat with more messages than the model's context has tokens, or
        with too many bytes, is refused before it is rendered."""
        self._check_fits("messages", len(messages), least=" at least")
        return self._renderer.render(messages, tools, body.chat_template_kwargs or {}, _ending(body))

    def _encoded(self, field: str, text: str, encode: Callable[[str], list[int]]) -> list[int]:
        """Return the token ids of a text. A text that is certainly too long for the model, or has too many bytes, is
        refused before it is tokenized."""
        if (number := num_bytes(text)) > MAX_PROMPT_BYTES:
            raise ContextTooLongError(
                f"{field} has {number} bytes, the prompt is too long: the limit is {MAX_PROMPT_BYTES}; shorten it"
            )
        self._check_fits(field, self.tokenizer.min_tokens(text), least=" at least")
        return encode(text)

    def _check_fits(self, field: str, num_tokens: int, least: str = "") -> None:
        limit = self.model.max_tokens - 1
        if num_tokens > limit:
            raise ContextTooLongError(
                f"{field} has {num_tokens} tokens{least}, the prompt is too long: the model takes at most {limit}, and "
                "one of output; shorten it"
            )

    def _with_room(self, options: SamplingOptions, prompt: Prompt) -> SamplingOptions:
        """Return the options. If they do not limit the output tokens, the limit is the rest of the model's context
        after the prompt. Raises ContextTooLongError if the requested number exceeds this rest."""
        num_tokens = len(prompt.token_ids)
        room = self.model.max_tokens - num_tokens
        most = options.get("max_tokens", room)
        if most > room:
            raise ContextTooLongError(
                f"max_tokens = {most} is out of range: after a prompt of {num_tokens} tokens there is room for {room}, "
                f"for the model's limit is {self.model.max_tokens}; ask for fewer, or shorten the prompt"
            )
        return options | SamplingOptions(max_tokens=most)

    def _prompts(self, body: CompletionBody) -> tuple[Prompt, ...]:
        given: list[Any] = [body.prompt] if isinstance(body.prompt, str) or _is_ids(body.prompt) else [*body.prompt]
        if not 1 <= len(given) <= MAX_PROMPTS:
            raise InvalidArgumentError(f"prompt holds {len(given)} prompts: send 1 to {MAX_PROMPTS}")
        return tuple(self._prompt(each, echo=bool(body.echo)) for each in given)

    def _prompt(self, given: str | list[int], *, echo: bool) -> Prompt:
        if isinstance(given, str):
            return Prompt(self._encoded("prompt", given, self.tokenizer.encode), given if echo else "")
        if any(not 0 <= token_id < self.model.vocab_size for token_id in given):
            raise InvalidArgumentError(f"prompt holds no token id of the model: use 0 to {self.model.vocab_size - 1}")
        return Prompt(given, self.tokenizer.decode(given, with_special=True) if echo else "")


def _sampling(body: SamplingBody) -> SamplingOptions:
    """Return the sampling options of a body. OpenAI's temperature is 1 unless given."""
    given = {name: getattr(body, name) for name in _OPTIONS if getattr(body, name) is not None}
    options = cast(SamplingOptions, {"temperature": 1.0} | given)
    if body.seed is not None:
        options["seed"] = body.seed % 2**64
    if body.top_k is not None:
        options["top_k"] = 0 if body.top_k == -1 else body.top_k
    if (form := structured_of(body)) is not None:
        options["structured_output"] = form
    return options


def _ending(body: ChatBody | TokenizeBody) -> Ending:
    """Return the kind of end of a chat's prompt. Raises InvalidArgumentError if the body requests two kinds at once."""
    if not body.continue_final_message:
        return Ending.MESSAGE if body.add_generation_prompt is False else Ending.TURN
    if body.add_generation_prompt:
        raise InvalidArgumentError("continue_final_message contradicts add_generation_prompt: set one of them")
    return Ending.OPEN


def _is_ids(prompt: Sequence[object]) -> bool:
    return bool(prompt) and isinstance(prompt[0], int)
