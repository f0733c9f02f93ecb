"""Reads what a client sends: every field checked, the prompt as token ids (step 1 of a request's way).

For whoever serves baton.v1.Orchestrator: the orchestrator itself, and gateways in front of it. Tokenizing takes a while
for long prompts, so these are read in threads (`off_the_loop`), for which no more than so many bytes wait.
"""

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import grpc

from baton.clock import Clock
from baton.errors import InvalidArgumentError, RequestCancelledError, ResourceExhaustedError
from baton.process.memory import free_bytes
from baton.proto_types import params_from_proto
from baton.sampling_params import SamplingParams
from baton.v1 import orchestrator_pb2 as pb
from orchestrator.api.checks import Intake

Context = grpc.aio.ServicerContext[Any, Any]
T = TypeVar("T")

MAX_READING_BYTES = 32 * 2**20
"""Of requests that are being read, or wait for a thread: four of the longest prompts, and of what admission holds a
multiple. Fewer where that is much of the memory (`reading_bytes`)."""
_MEMORY_OF_BYTE = 160
"""Bytes of memory that a byte of text takes while it is tokenized, measured on text that takes much."""
_MEMORY_SHARE = 0.25
"""Of the free memory, that reading may take."""
_SHORT_BYTES = 256
"""Of a request that is read in a fifth of a millisecond: about what asking a thread costs."""
_RETRY_S = 0.1
"""A refused request's hint: ten thousand tokens are read within about that."""
_MARGIN_S = 0.1
"""How much earlier than the client's own deadline a request ends, at most, so that its usage still arrives."""


@dataclass(frozen=True)
class Asked:
    """What a client asks for, within the model's limits."""

    prompt_ids: tuple[int, ...]
    params: SamplingParams
    is_seeded: bool
    """Whether the parameters' seed is meant."""
    outputs: tuple[tuple[int, ...], ...]
    """Of a resumed stream: the tokens that the client has, one tuple a choice."""
    echo: str
    """What the text of each choice begins with."""


class RequestReader:
    """Reads requests for one model. `read` may be called in any thread; `off_the_loop` belongs to one loop."""

    def __init__(self, intake: Intake, max_bytes: int | None = None) -> None:
        """`max_bytes` of requests are read off the loop at a time, or one that is longer by itself; None: as many as
        the memory that is free now allows."""
        self._intake = intake
        self._max_bytes = reading_bytes(free_bytes()) if max_bytes is None else max_bytes
        self._num_bytes = 0  # of what is being read off the loop

    def read(self, request: pb.GenerateRequest) -> Asked:
        """Raises InvalidArgumentError that names the field, the value and the limit."""
        intake = self._intake
        intake.check_names(request.request_id, request.model)
        if request.echo and request.HasField("chat"):
            raise InvalidArgumentError("echo with chat: an answer does not go on from a chat's text, leave it out")
        params = params_from_proto(request.sampling) if request.HasField("sampling") else SamplingParams()
        is_seeded = request.seeded or params.seed != 0
        intake.check_num_outputs(len(request.outputs), params)
        outputs = [output.token_ids for output in request.outputs]
        intake.check_resumption(outputs, params, is_seeded)
        prompt_ids = self._prompt_ids(request)
        intake.check_sampling(params, len(prompt_ids))
        echo = self._prompt_text(request, prompt_ids) if request.echo else ""
        return Asked(prompt_ids, params, is_seeded, tuple(tuple(ids) for ids in outputs), echo)

    async def off_the_loop(self, request: pb.GenerateRequest, read: Callable[[], T]) -> T:
        """What `read` makes of the request, in a thread unless that is quick. Raises ResourceExhaustedError at once
        when too much is being read."""
        num_bytes = request.ByteSize()
        if num_bytes <= _SHORT_BYTES:
            return read()
        self._take(num_bytes)
        given_up = threading.Event()
        reading = asyncio.get_running_loop().run_in_executor(None, _unless, given_up, read)
        reading.add_done_callback(partial(self._give_back, num_bytes))
        try:
            await asyncio.wait((reading,))  # when cancelled, leaves it: it counts for as long as the executor has it
            return reading.result()
        finally:
            given_up.set()
            del reading  # which an error's traceback would hold, and it the error

    def _take(self, num_bytes: int) -> None:
        if self._num_bytes and self._num_bytes + num_bytes > self._max_bytes:
            raise ResourceExhaustedError(
                f"{self._num_bytes} bytes of prompts are being read, and {num_bytes} more exceed the limit of "
                f"{self._max_bytes}: try again in {_RETRY_S:.1f} s",
                retry_after_s=_RETRY_S,
            )
        self._num_bytes += num_bytes

    def _give_back(self, num_bytes: int, reading: asyncio.Future[Any]) -> None:
        self._num_bytes -= num_bytes
        if not reading.cancelled():
            reading.exception()  # seen, also where nobody waits for it any more

    def _prompt_ids(self, request: pb.GenerateRequest) -> tuple[int, ...]:
        match request.WhichOneof("input"):
            case "prompt":
                return self._intake.encode_text(request.prompt)
            case "chat":
                self._intake.check_num_messages(len(request.chat.messages))
                messages = [{"role": each.role, "content": each.content} for each in request.chat.messages]
                return self._intake.encode_chat(messages)
            case "token_ids":
                return self._intake.check_prompt_ids(request.token_ids.ids)
        raise InvalidArgumentError("input is not set: send prompt, chat or token_ids")

    def _prompt_text(self, request: pb.GenerateRequest, prompt_ids: tuple[int, ...]) -> str:
        return request.prompt.decode() if request.HasField("prompt") else self._intake.decode(prompt_ids)


def reading_bytes(num_bytes_free: int) -> int:
    """Bytes of requests that may be read at a time in a process that finds so much memory free."""
    return min(MAX_READING_BYTES, int(_MEMORY_SHARE * num_bytes_free) // _MEMORY_OF_BYTE)


def _unless(given_up: threading.Event, read: Callable[[], T]) -> T:
    if given_up.is_set():
        raise RequestCancelledError("the client went away before its request was read")
    return read()


def deadline_s(request: pb.GenerateRequest, context: Context, clock: Clock) -> float | None:
    """The earlier of the request's own deadline and, with a margin, the call's; on the clock's now_s()."""
    left_s = [request.deadline_ms / 1000] if request.deadline_ms else []
    if (call_s := context.time_remaining()) is not None:
        left_s.append(call_s - min(_MARGIN_S, 0.1 * call_s))
    return clock.now_s() + min(left_s) if left_s else None
