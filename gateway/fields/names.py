"""Translates the names of request fields in error messages. Baton's errors use the names of Baton's own API or of a
chat request. The client must see the names of the fields that it has sent. The functions have no side effects."""

from gateway.bodies import ChatBody, CompletionBody, SamplingBody, TokenizeBody
from gateway.errors import FieldNames
from gateway.fields.structured import form_names
from gateway.fields.unsupported import REFUSED
from gateway.tools.choice import parameter_names


def completion_names(body: CompletionBody) -> FieldNames:
    """Return the client's names of the fields of a completion request, for use in error messages."""
    renamed = {"token_ids": "prompt", "prompt_ids": "prompt", "prompt_logprobs": "logprobs"}
    return _names(body, renamed | form_names(body))


def chat_names(body: ChatBody) -> FieldNames:
    """Return the client's names of the fields of a chat request, for use in error messages."""
    most = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    renamed = {"token_ids": "messages", "prompt_ids": "messages", "logprobs": "top_logprobs", "max_tokens": most}
    form = parameter_names(body.tools or (), body.tool_choice) or form_names(body)
    return _names(body, renamed | form)


def tokenize_names(body: TokenizeBody) -> FieldNames:
    """Return the client's names of the fields of a request to tokenize a text or a chat, for use in error messages."""
    return _names(body, {})


def _names(body: SamplingBody | TokenizeBody, renamed: dict[str, str]) -> FieldNames:
    return FieldNames({*type(body).model_fields, *REFUSED}, renamed)
