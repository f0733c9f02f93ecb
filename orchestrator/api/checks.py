"""Checks every field of a client's request against the model's limits, and tokenizes prompts.

Used by `orchestrator.api.request_reader`. A failed check raises InvalidArgumentError, which names the field, the value
and the limit. Objects are read-only after construction. Tokenizing a long prompt takes a while, so it must be done in a
thread.
"""

from collections.abc import Mapping, Sequence

from baton.errors import InvalidArgumentError
from baton.limits import MAX_CACHE_SALT_CHARS, MAX_PROMPT_BYTES, MAX_REQUEST_ID_CHARS
from baton.results.completion import ModelInfo
from baton.sampling_params import SamplingParams
from baton.text.stop_strings import StopStrings
from baton.text.stream import TextStream
from baton.text.tokenizer import Tokenizer
from baton.types import FinishReason


class RequestValidator:
    """Checks the fields of requests against the limits of one model."""

    def __init__(self, tokenizer: Tokenizer, model: ModelInfo, eos_token_ids: Sequence[int]) -> None:
        self.tokenizer = tokenizer
        self.model = model
        self.eos_token_ids = eos_token_ids

    def check_names(self, request_id: str, model: str) -> None:
        """Check the id of a request, and the name of the model that it requests. Either may be empty. Raises
        InvalidArgumentError."""
        if len(request_id) > MAX_REQUEST_ID_CHARS or not (request_id.isascii() and request_id.isprintable()):
            raise InvalidArgumentError(
                f"request_id = {request_id[:40]!r} is out of range: use at most {MAX_REQUEST_ID_CHARS} printable "
                "ASCII characters"
            )
        if model not in ("", self.model.name):
            raise InvalidArgumentError(f"model = {model[:80]!r} is unknown: {self.model.name!r} is served here")

    def check_cache_salt(self, salt: str) -> None:
        """Check the length of a cache salt. Requests share cached prompts only with requests of the same salt. The salt
        may be empty. Raises InvalidArgumentError if it is too long."""
        if len(salt) > MAX_CACHE_SALT_CHARS:
            raise InvalidArgumentError(
                f"cache_salt has {len(salt)} characters: the limit is {MAX_CACHE_SALT_CHARS}; send a hash of it"
            )

    def encode_text(self, prompt: bytes) -> tuple[int, ...]:
        """Return the token ids of a prompt, which is text in UTF-8. Takes long for long prompts. Raises
        InvalidArgumentError if the prompt is too long or not UTF-8."""
        self._check_bytes("prompt", len(prompt))
        try:
            text = prompt.decode()
        except UnicodeDecodeError as error:
            raise InvalidArgumentError(f"prompt is not UTF-8 at byte {error.start}: {error.reason}") from error
        self._check_fits("prompt", text)
        return self._checked_prompt("prompt", self.tokenizer.encode(text))

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> tuple[int, ...]:
        """Return the token ids of a conversation in the model's chat format. The assistant's answer can follow the last
        token. Takes long for long conversations. Raises InvalidArgumentError if the conversation is too long."""
        self._check_bytes("chat", sum(len(text.encode()) for message in messages for text in message.values()))
        rendered = self.tokenizer.render_chat(messages)
        self._check_fits("chat", rendered)
        return self._checked_prompt("chat", self.tokenizer.encode_rendered(rendered))

    def check_num_messages(self, num_messages: int) -> None:
        """Check the number of messages of a chat, before their content is read. Each message has at least one token, so
        there cannot be more messages than tokens. Raises InvalidArgumentError."""
        if num_messages > self.model.max_tokens:
            raise InvalidArgumentError(
                f"chat has {num_messages} messages: the model's limit is {self.model.max_tokens} tokens; send fewer"
            )

    def check_prompt_ids(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """Check the token ids that a client sent as the prompt, and return them. The ids of a list that is too long are
        not read. Raises InvalidArgumentError."""
        checked = self._checked_prompt("token_ids", token_ids)
        self._check_ids("token_ids", checked)
        return checked

    def check_sampling(self, params: SamplingParams, num_prompt_tokens: int) -> None:
        """Check sampling parameters against the model's vocabulary, and against the number of tokens that can follow
        the prompt. Raises InvalidArgumentError."""
        self._check_ids("sampling.logit_bias", tuple(params.logit_bias))
        self._check_ids("sampling.stop_token_ids", params.stop_token_ids)
        room = self.model.max_tokens - num_prompt_tokens
        if params.max_tokens > room:
            raise InvalidArgumentError(
                f"sampling.max_tokens = {params.max_tokens} is out of range: after a prompt of {num_prompt_tokens} "
                f"tokens there is room for {room}, for the model's limit is {self.model.max_tokens}"
            )

    def check_num_outputs(self, num_outputs: int, params: SamplingParams) -> None:
        """Check the number of lists of output tokens that a client sends to resume a stream. It must be 0, or one per
        choice. Raises InvalidArgumentError."""
        if num_outputs not in (0, params.n):
            raise InvalidArgumentError(f"outputs has {num_outputs} lists: sampling.n is {params.n}, send one a choice")

    def check_resumption(self, outputs: Sequence[Sequence[int]], params: SamplingParams, is_seeded: bool) -> None:
        """Check the lists of output tokens that a client sends to resume a stream: the length of each list, then its
        token ids. If the stream is sampled at random, check also that the client sent the stream's seed. The ids of a
        list that is too long are not read. Raises InvalidArgumentError."""
        limits = ((params.max_tokens, "sampling.max_tokens"), (self.model.max_tokens, "the model's limit"))
        for output_ids in outputs:
            for limit, whose in limits:
                if len(output_ids) > limit:
                    raise InvalidArgumentError(f"outputs holds {len(output_ids)} tokens: {whose} is {limit}")
            self._check_ids("outputs", output_ids)
        if outputs and params.temperature and not is_seeded:
            raise InvalidArgumentError("outputs without seeded: send the seed of the stream that is resumed")

    def end_of(
        self, prompt_ids: Sequence[int], output_ids: Sequence[int], params: SamplingParams
    ) -> FinishReason | None:
        """Return the finish reason of a choice with these output tokens; None if the choice may get more tokens."""
        if not output_ids:
            return None
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else self.eos_token_ids)}
        is_stop = output_ids[-1] in ends and len(output_ids) > params.min_tokens
        if is_stop or self._has_stop_string(prompt_ids, output_ids, params):
            return FinishReason.STOP
        return FinishReason.LENGTH if len(output_ids) == params.max_tokens else None

    def _has_stop_string(self, prompt_ids: Sequence[int], output_ids: Sequence[int], params: SamplingParams) -> bool:
        if not params.stop:
            return False
        stream = TextStream(self.tokenizer, StopStrings.of(params), prompt_ids)
        return any(stream.push(token_id).stopped for token_id in output_ids)

    def _check_bytes(self, field: str, num_bytes: int) -> None:
        if num_bytes > MAX_PROMPT_BYTES:
            raise InvalidArgumentError(f"{field} has {num_bytes} bytes: the limit is {MAX_PROMPT_BYTES}; shorten it")

    def _check_fits(self, field: str, text: str) -> None:
        """Raise an error if the minimum number of tokens of the text exceeds the model's limit. Called before
        tokenizing."""
        least, limit = self.tokenizer.min_tokens(text), self.model.max_tokens - 1
        if least > limit:
            raise InvalidArgumentError(
                f"{field} has {len(text)} characters, which are {least} tokens at least: the model takes at most "
                f"{limit}, and one of output; shorten it"
            )

    def _checked_prompt(self, field: str, token_ids: Sequence[int]) -> tuple[int, ...]:
        if not token_ids:
            raise InvalidArgumentError(f"{field} is empty: send at least one token")
        limit = self.model.max_tokens - 1
        if len(token_ids) > limit:
            raise InvalidArgumentError(
                f"{field} has {len(token_ids)} tokens: the model takes at most {limit}, and one of output; shorten it"
            )
        return tuple(token_ids)

    def _check_ids(self, field: str, token_ids: Sequence[int]) -> None:
        largest = max(token_ids, default=0)
        if largest >= self.model.vocab_size:
            raise InvalidArgumentError(
                f"{field} holds {largest}: the model's token ids end at {self.model.vocab_size - 1}"
            )
