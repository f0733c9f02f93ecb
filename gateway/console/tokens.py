"""The playground's stream: its tokens, the origin of each token, and the times and usage of the request. Pure.

An event has the same information as in the server's own stream (`baton.TokenEvent`). The origin of tokens is sent when
it changes. The last event of a step reports which of the step's tokens were drafts. The page combines these events.
"""

from dataclasses import asdict

from baton.errors import InvalidArgumentError
from baton.results.completion import Completion
from baton.types import TokenEvent
from gateway.answers import Object
from gateway.console.views import taken
from gateway.reading import Asked


def check_single(asked: Asked) -> None:
    """Raise InvalidArgumentError unless the request has one prompt and one choice, because the page can show only
    one."""
    if len(asked.prompts) != 1 or asked.num_choices != 1:
        raise InvalidArgumentError("n and prompt: the playground shows one choice of one prompt; use /v1 for more")


def begun(output: Completion) -> Object:
    """Return the properties of the request that are known once the server has accepted it."""
    return {
        "id": output.request_id,
        "model": output.model,
        "seed": None if output.seed is None else str(output.seed),  # 64 bits, more than JavaScript's numbers hold
        "exact": output.exact,
        "num_prompt_tokens": output.num_prompt_tokens,
    }


def token(event: TokenEvent, own_text: str) -> Object:
    """Return one event of the stream. `own_text` is the text of this token alone; the event's text may belong to
    several tokens."""
    return {
        "index": event.index,
        "id": None if event.token is None else event.token.token_id,
        "text": event.text,
        "own_text": own_text,
        "at_ms": event.unix_ns / 1e6,
        "finish": None if event.finish is None else event.finish.value,
        "drafts": None if event.drafts is None else asdict(event.drafts),
        "origin": None if event.origin is None else asdict(event.origin),
    }


def ended(output: Completion) -> Object:
    """Return the request's usage, and its measured and predicted times."""
    timings = output.timings
    return {
        "usage": None if output.usage is None else asdict(output.usage),
        "taken": None if timings is None else taken(timings),
        "received_ms": None if timings is None else timings.received_ns / 1e6,
        "first_token_ms": None if timings is None else timings.first_token_ns / 1e6,
        "num_resumes": output.num_resumes,
    }
