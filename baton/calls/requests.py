"""Builds the protobuf message of a generation request (proto/baton/v1/orchestrator.proto). Does no I/O.

This module checks only values that the message cannot represent. The server checks all other values against its model.
"""

import math
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from baton.errors import InvalidArgumentError
from baton.limits import MAX_MESSAGE_BYTES
from baton.proto_types import params_to_proto
from baton.sampling_params import SamplingOptions, SamplingParams, params_from_options
from baton.types import Priority
from baton.v1 import common_pb2, orchestrator_pb2

MAX_DEADLINE_S = 2**32 / 1000 - 1
BY_CHAIN = ("baton-prefill", "chain")
"""Metadata of gRPC that forces a chain (several prefill workers that compute one prompt together) to compute the
prompt, even if the generation group would be faster. Used in benchmarks of chains."""


@dataclass(frozen=True)
class PromptInput:
    """Input of a request. Exactly one of the fields must be set."""

    prompt: str | bytes | None = None
    """Prompt as text. Bytes must be valid UTF-8."""
    messages: Sequence[Mapping[str, str]] | None = None
    """Chat as a list of mappings with `role` and `content`. It is rendered with the model's chat template."""
    token_ids: Sequence[int] | None = None
    """Prompt as token ids, already tokenized."""

    def __post_init__(self) -> None:
        given = [name for name, value in vars(self).items() if value is not None]
        if len(given) != 1:
            raise InvalidArgumentError(
                f"input is {' and '.join(given) or 'missing'}: give one of prompt, messages, token_ids"
            )


def make_request(
    source: PromptInput,
    params: SamplingParams | None,
    options: SamplingOptions,
    priority: str = "standard",
    fields: orchestrator_pb2.GenerateRequest | None = None,
) -> orchestrator_pb2.GenerateRequest:
    """Return the message of a request. `fields` contains further fields of the message. If `fields` contains no request
    id, a new id is generated. Raises InvalidArgumentError for a request that cannot be sent, and TypeError for an
    unknown sampling option."""
    if params is not None and options:
        raise InvalidArgumentError(f"params and {', '.join(options)} contradict: give one SamplingParams, or options")
    request = orchestrator_pb2.GenerateRequest(
        request_id=uuid.uuid4().hex,
        seeded=params is not None or "seed" in options,
        priority=orchestrator_pb2.Priority.ValueType(_priority(priority)),
    )
    if fields is not None:
        request.MergeFrom(fields)
    params = params or params_from_options(options)
    try:
        request.sampling.CopyFrom(params_to_proto(params))
    except ValueError as error:
        raise InvalidArgumentError(
            f"sampling.{_unsendable(params)}: {error}: use integers below 2**32 and whole characters"
        ) from error
    _add_source(request, source)
    if request.ByteSize() > MAX_MESSAGE_BYTES:
        raise InvalidArgumentError(
            f"request is {request.ByteSize()} bytes long, over the limit of {MAX_MESSAGE_BYTES}: send less text"
        )
    return request


def check_deadline(deadline_s: float | None) -> None:
    """Raise InvalidArgumentError if the deadline is not positive, not finite, or too large for the message."""
    if deadline_s is not None and not (0 < deadline_s <= MAX_DEADLINE_S and math.isfinite(deadline_s)):
        raise InvalidArgumentError(f"deadline_s = {deadline_s!r} is out of range: use seconds above 0, below 4 million")


def call_metadata(api_key: str | None, tenant: str | None) -> tuple[tuple[str, str], ...]:
    """Return the gRPC metadata that identifies the caller to a server. Raises InvalidArgumentError if the API key or
    the tenant is not printable ASCII."""
    values = {"api_key": api_key, "tenant": tenant}
    for name, value in values.items():
        if value is not None and not (value and value.isascii() and value.isprintable()):
            raise InvalidArgumentError(f"{name} cannot be sent: use printable ASCII characters")
    keyed = () if api_key is None else (("authorization", f"Bearer {api_key}"),)
    return keyed if tenant is None else (*keyed, ("baton-tenant", tenant))


def _unsendable(params: SamplingParams) -> str:
    """Return the name of the first sampling parameter that the message cannot represent."""
    for name, value in vars(params).items():
        try:
            field: dict[str, Any] = {name: None if name == "structured_output" else value}
            common_pb2.SamplingParams(**field)
        except ValueError:
            return name
    return "structured_output"


def _priority(name: str) -> Priority:
    known = {each.name.lower(): each for each in Priority}
    if name not in known:
        raise InvalidArgumentError(f"priority = {name!r} is unknown: use one of {', '.join(known)}")
    return known[name]


def _add_source(request: orchestrator_pb2.GenerateRequest, source: PromptInput) -> None:
    if source.prompt is not None:
        request.prompt = _encoded(source.prompt)
    elif source.messages is not None:
        request.chat.SetInParent()  # an empty chat is sent, and refused by the server
        for index, message in enumerate(source.messages):
            request.chat.messages.add(**_chat_fields(index, message))
    else:
        request.token_ids.SetInParent()
        try:
            request.token_ids.ids.extend(source.token_ids or ())
        except ValueError as error:
            raise InvalidArgumentError(f"token_ids: {error}: use the model's token ids") from error


def _encoded(prompt: str | bytes) -> bytes:
    try:
        return prompt if isinstance(prompt, bytes) else prompt.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgumentError(f"prompt holds half a character at {error.start}: it cannot be UTF-8") from error


def _chat_fields(index: int, message: Mapping[str, str]) -> dict[str, str]:
    wrong = {"role", "content"} ^ message.keys()
    if wrong:
        raise InvalidArgumentError(
            f"messages[{index}] lacks, or does not know, {', '.join(sorted(wrong))}: give role and content"
        )
    return dict(message)
