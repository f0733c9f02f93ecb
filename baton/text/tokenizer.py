"""Loads a model's tokenizer and chat template from a Hugging Face folder, without torch.

`orchestrator.api.checks` uses it to convert prompts and chats to token ids. Workers use only the tokenizer's core
(`baton.text.core_tokenizer`).

A Tokenizer is not changed after `load`, so any thread may use it. Encoding does not block other threads.
`transformers.AutoTokenizer` would import torch. Therefore `TokenizersBackend` is used, which is the class that
AutoTokenizer would select, and which does not import torch.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from enum import Enum, auto
from functools import cached_property
from inspect import signature
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from jinja2 import TemplateError, TemplateSyntaxError
from tokenizers import AddedToken
from tokenizers import Tokenizer as Core
from transformers.tokenization_utils_tokenizers import TokenizersBackend

from baton.errors import InvalidArgumentError, ModelError
from baton.limits import MAX_ROLE_CHARS
from baton.text.control_tokens import ControlTokens, cut, min_parts
from baton.text.core_tokenizer import CoreTokenizer
from baton.text.token_bounds import token_bound

_REFUSALS = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""Errors that a chat template may raise, intentionally or not, for values that it does not support."""
Messages = Sequence[Mapping[str, Any]]
"""Conversation as a sequence of messages. Each message has a `role` and a `content`, and may have fields for tool
calls."""
NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})
_MESSAGE_FIELDS = ("role", "content")
_TOOL_FIELDS = ("tool_calls", "tool_call_id", "name", "reasoning_content")
"""Optional fields of a message, for tool calls, their results, and the model's reasoning."""
_ROLE = re.compile(rf"[A-Za-z][A-Za-z0-9_.-]{{0,{MAX_ROLE_CHARS - 1}}}")
_OWN_OPTIONS = frozenset(signature(TokenizersBackend.apply_chat_template).parameters) | {"messages"}
"""Names that cannot be used as options of a chat template, because they are parameters of the function that renders
it."""


class Ending(Enum):
    """Place at which a chat prompt ends: at the start of the assistant's turn, after the last message, or within the
    last message."""

    TURN = auto()
    """The prompt ends with the beginning of the assistant's turn, which the model continues."""
    MESSAGE = auto()
    """The prompt ends after the last message, which is complete."""
    OPEN = auto()
    """The prompt ends inside the last message, directly after its text, so that the model continues this message."""


class Tokenizer(CoreTokenizer):
    """Tokenizer of one model with its chat template. Create it with `load`."""

    def __init__(self, backend: TokenizersBackend, folder: Path, *, control_tokens_in_text: bool = False) -> None:
        super().__init__(backend.backend_tokenizer)
        self._hf = backend
        self._folder = folder
        added = self._core.get_added_tokens_decoder()
        self._control = None if control_tokens_in_text else ControlTokens(added.values(), str(backend.chat_template))
        """Finds control tokens in the texts of chats and marks them, so that they are encoded as ordinary characters.
        None: texts are not marked, and a control token in a text is encoded as the control token."""
        self._guard = next((token.content for token in added.values() if _is_guard(self._core, token)), "")
        self._vocab_size = 1 + max(self._core.get_vocab(with_added_tokens=True).values())
        self._bound = token_bound(self._core)

    @classmethod
    def load(cls, folder: Path, *, control_tokens_in_text: bool = False) -> Self:
        """Load tokenizer.json, tokenizer_config.json and the chat template from a folder. The network is not used, and
        no code from the folder is run. The first call blocks for a second.

        If `control_tokens_in_text` is True, the characters of a control token in a chat's text are encoded as the
        control token. Raises ModelError for missing or invalid files.
        """
        if not (folder / "tokenizer.json").is_file():
            raise ModelError(f"no tokenizer.json in {folder}: {_remedy(folder)}")
        try:
            backend = TokenizersBackend.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
            return cls(backend, folder, control_tokens_in_text=control_tokens_in_text)
        except Exception as error:  # the tokenizers library raises bare Exceptions
            raise ModelError(
                f"cannot read the tokenizer in {folder}: {_one_line(error)}; fetch its tokenizer files again"
            ) from error

    @property
    def vocab_size(self) -> int:
        """Return the size of the tokenizer's vocabulary: the largest token id plus 1. The model's vocabulary may be
        padded to a larger size."""
        return self._vocab_size

    @property
    def has_chat_template(self) -> bool:
        """Return True if the model has a chat template. Without it, `render_chat` and `encode_chat` raise an error."""
        return bool(self._hf.chat_template)

    def chat_template(self, *, for_tools: bool = False) -> str:
        """Return the chat template. If `for_tools` is True, return the template for chats with tools. Empty if the
        model has no chat template."""
        if not self.has_chat_template:
            return ""
        return str(self._hf.get_chat_template(tools=[{}] if for_tools else None))

    @cached_property
    def fingerprint(self) -> str:
        """Return a fingerprint of the tokenizer and its chat template, as 16 hex digits. Equal tokenizers with equal
        chat templates have the same fingerprint."""
        content = f"{self._core.to_str()}/{self._hf.chat_template}"
        return hashlib.blake2b(content.encode(), digest_size=8).hexdigest()

    def min_tokens(self, text: str) -> int:
        """Return a lower bound on the number of tokens of `text`. Takes milliseconds for megabytes of text. The bound
        is 0 if it is not known which bytes the tokenizer may drop (`baton.text.token_bounds`)."""
        return max(self._bound.min_tokens(text), min_parts(text)) if self._bound is not None else 0

    def encode_chat(self, messages: Messages) -> list[int]:
        """Convert a conversation to token ids. It is rendered with `render_chat` and encoded with `encode_rendered`."""
        return self.encode_rendered(self.render_chat(messages))

    def render_chat(
        self,
        messages: Messages,
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] = NO_OPTIONS,
        ending: Ending = Ending.TURN,
    ) -> str:
        """Render a conversation as text with the model's chat template.

        `tools` are functions that the model may call, in the format of OpenAI's API. `options` are further variables of
        the template, such as enable_thinking. `ending` specifies how the text ends. All special tokens are written by
        the template. If the arguments contain the characters of a special token, these characters are marked, so that
        `encode_rendered` does not encode them as the special token.

        Raises InvalidArgumentError for invalid messages or options, and for a model without a chat template. Raises
        ModelError for an invalid template.
        """
        _check_messages(messages, self._control)
        if own := _OWN_OPTIONS & options.keys():
            raise InvalidArgumentError(f"chat_template_kwargs: {min(own)} is not a variable of a template: drop it")
        if not self.has_chat_template:
            raise InvalidArgumentError(
                f"messages: the model in {self._folder} has no chat template: send a text prompt or token ids instead"
            )
        given: list[Any] | None = [dict(tool) for tool in tools] if tools else None
        last = messages[-1]
        if ending is Ending.OPEN and (not last["content"].strip() or last.get("tool_calls")):
            raise InvalidArgumentError("messages: only a last message of text can be continued: end with one")
        how = {"add_generation_prompt": ending is Ending.TURN, "continue_final_message": ending is Ending.OPEN}
        return self._render([dict(message) for message in messages], given, {**options, **how})

    def encode_rendered(self, text: str) -> list[int]:
        """Convert a conversation that `render_chat` has rendered to token ids. No special tokens are added. Raises
        InvalidArgumentError for text that is not valid Unicode."""
        first, *others = [text] if self._control is None else cut(text)
        ids = self._encode(first, "messages", add_special_tokens=False)
        if others:
            different = list(dict.fromkeys(others))
            # after a token at which tokenizers cut a text, a part gets no mark of a text's beginning
            found = self._encode_all([self._guard + part for part in different], add_special_tokens=False)
            ids_of = dict(zip(different, found, strict=True))
            for part in others:
                ids += ids_of[part][bool(self._guard) :]
        return ids

    def _render(self, messages: list[dict[str, Any]], tools: list[Any] | None, options: Mapping[str, Any]) -> str:
        try:
            if self._control is not None:
                messages, tools, options = (self._control.mark(each) for each in (messages, tools, options))
            text = self._hf.apply_chat_template(messages, tools=tools, tokenize=False, **options)
        except TemplateSyntaxError as error:
            raise ModelError(
                f"the chat template in {self._folder} is broken: {_one_line(error)}; correct its chat_template"
            ) from error
        except _REFUSALS as error:
            raise InvalidArgumentError(
                f"messages: the model's chat template refuses them: {_one_line(error)}; correct roles and their order"
            ) from error
        assert isinstance(text, str)
        return text


def _is_guard(core: Core, token: AddedToken) -> bool:
    """Return whether the token is encoded as a single id, and text after it is encoded as in the middle of a text."""
    if not token.special or token.lstrip or token.rstrip or token.single_word or token.normalized:
        return False
    return core.encode(token.content + "a", add_special_tokens=False).ids[:1] == [core.token_to_id(token.content)]


def _check_messages(messages: Messages, control: ControlTokens | None) -> None:
    if not messages:
        raise InvalidArgumentError("messages is empty: send at least one message")
    for index, message in enumerate(messages):
        for name in _MESSAGE_FIELDS:
            if not isinstance(message.get(name), str):
                raise InvalidArgumentError(f"messages[{index}].{name} is {message.get(name)!r:.40}: use a string")
        if not message["role"]:
            raise InvalidArgumentError(f"messages[{index}].role is empty: use a role such as 'user'")
        if _ROLE.fullmatch(message["role"]) is None:
            raise InvalidArgumentError(
                f"messages[{index}].role is {message['role']!r:.40}: use a role such as 'user', at most "
                f"{MAX_ROLE_CHARS} letters, digits, '_', '.' and '-'"
            )
        if control is not None and control.is_part(message["role"]):
            raise InvalidArgumentError(
                f"messages[{index}].role is {message['role']!r}, part of a control token: use a role such as 'user'"
            )
        for name in message:
            if name not in _MESSAGE_FIELDS + _TOOL_FIELDS:
                raise InvalidArgumentError(
                    f"messages[{index}].{name!s:.40} is unknown: use {', '.join(_MESSAGE_FIELDS + _TOOL_FIELDS)}"
                )


def _remedy(folder: Path) -> str:
    if not folder.is_dir():
        return "there is no such folder; check the path"
    if (folder / "tokenizer.model").is_file():
        return "convert tokenizer.model with transformers' AutoTokenizer(...).save_pretrained(...)"
    return "fetch the model's tokenizer files too"


def _one_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
