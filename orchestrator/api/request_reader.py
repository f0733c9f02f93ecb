"""Converts a client's message into a `Request`: checks every field, and tokenizes the prompt.

Used by `orchestrator.api.frontend` and `orchestrator.api.gateway`. The checks are in `orchestrator.api.checks`.
Tokenizing a long prompt takes a while, so long requests are read in threads (`off_the_loop`).
"""

import secrets
import uuid
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import grpc

from baton.errors import InvalidArgumentError
from baton.process.clock import Clock
from baton.proto_types import params_from_proto, priority_from_proto
from baton.sampling_params import SamplingParams
from baton.text.bounded_reading import BoundedReading
from baton.types import RequestId
from baton.v1 import orchestrator_pb2 as pb
from orchestrator.api.checks import RequestValidator
from orchestrator.requests.request import Request
from orchestrator.requests.tenants import DEFAULT_TENANT, Tenant

Context = grpc.aio.ServicerContext[Any, Any]
T = TypeVar("T")

_SHORT_BYTES = 256
"""Maximum size in bytes of a request that is read on the event loop. Larger requests are read in a thread. Reading a
request of this size takes 0.2 ms, about as long as passing it to a thread."""
_MARGIN_S = 0.1
"""Maximum number of seconds by which a request is ended before the deadline of the client's gRPC call. The request is
ended early so that the usage report still reaches the client in time."""


class RequestReader:
    """Reads requests for one model. `read` may be called in any thread. `off_the_loop` may be called on one event loop
    only."""

    def __init__(self, validator: RequestValidator, max_bytes: int | None = None) -> None:
        """Create a reader. `max_bytes` is the maximum total size in bytes of the requests that are read in threads at
        the same time. If it is None, the limit depends on the free memory."""
        self._validator = validator
        self._reading = BoundedReading(max_bytes)

    def read(
        self,
        message: pb.GenerateRequest,
        *,
        tenant: Tenant = DEFAULT_TENANT,
        end_s: float | None = None,
        by_chain: bool = False,
        trace_context: tuple[tuple[str, str], ...] = (),
    ) -> Request:
        """Check the message, tokenize its prompt, and return the request. Generates an id and a seed if the client sent
        none. Blocks the calling thread while it tokenizes.

        `tenant`, `end_s`, `by_chain` and `trace_context` come from the call, not from the message. `end_s` is the
        request's deadline; None: no deadline. If `by_chain` is True, a prefill chain is used whenever one is available.
        Raises InvalidArgumentError, which names the field, its value and the limit.
        """
        validator = self._validator
        validator.check_names(message.request_id, message.model)
        validator.check_cache_salt(message.cache_salt)
        if message.echo and message.HasField("chat"):
            raise InvalidArgumentError("echo with chat: an answer does not continue a chat's text, leave it out")
        params = params_from_proto(message.sampling) if message.HasField("sampling") else SamplingParams()
        is_seeded = message.seeded or params.seed != 0
        validator.check_num_outputs(len(message.outputs), params)
        validator.check_resumption([output.token_ids for output in message.outputs], params, is_seeded)
        prompt_ids = self._prompt_ids(message)
        validator.check_sampling(params, len(prompt_ids))
        echo = ""
        if message.echo:
            is_text, decode = message.HasField("prompt"), validator.tokenizer.decode
            echo = message.prompt.decode() if is_text else decode(prompt_ids, with_special=True)
        outputs = tuple(tuple(output.token_ids) for output in message.outputs)
        return Request(
            request_id=RequestId(message.request_id or uuid.uuid4().hex),
            prompt_ids=prompt_ids,
            params=params if is_seeded else replace(params, seed=secrets.randbits(64)),
            outputs=outputs,
            ended=tuple(validator.end_of(prompt_ids, output, params) for output in outputs),
            deadline_s=end_s,
            echo=echo,
            priority=priority_from_proto(message.priority),
            tenant=tenant,
            by_chain=by_chain,
            exact=message.exact,
            trace_context=trace_context,
            prefix_salt=message.cache_salt,
        )

    async def off_the_loop(self, message: pb.GenerateRequest, read: Callable[[], T]) -> T:
        """Call `read` and return its result. `read` is called on the event loop if the message is short, and in a
        thread otherwise. Raises the errors of `read`. Raises ResourceExhaustedError immediately if the requests that
        are being read in threads already use the maximum number of bytes."""
        num_bytes = message.ByteSize()
        return read() if num_bytes <= _SHORT_BYTES else await self._reading.run(num_bytes, read)

    def _prompt_ids(self, message: pb.GenerateRequest) -> tuple[int, ...]:
        match message.WhichOneof("input"):
            case "prompt":
                return self._validator.encode_text(message.prompt)
            case "chat":
                self._validator.check_num_messages(len(message.chat.messages))
                messages = [{"role": each.role, "content": each.content} for each in message.chat.messages]
                return self._validator.encode_chat(messages)
            case "token_ids":
                return self._validator.check_prompt_ids(message.token_ids.ids)
        raise InvalidArgumentError("input is not set: send prompt, chat or token_ids")


def deadline_s(message: pb.GenerateRequest, context: Context, clock: Clock) -> float | None:
    """Return the time at which the request must end, as a value of `clock.now_s()`. This is the earlier of two
    deadlines: the deadline in the message, and a time shortly before the deadline of the gRPC call (`_MARGIN_S`).
    Return None if neither is set."""
    left_s = [message.deadline_ms / 1000] if message.deadline_ms else []
    if (call_s := context.time_remaining()) is not None:
        left_s.append(call_s - min(_MARGIN_S, 0.1 * call_s))
    return clock.now_s() + min(left_s) if left_s else None
