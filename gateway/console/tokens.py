"""The playground's stream: its tokens, where each of them comes from, and what its request took. Pure.

An event says what the server's own stream says (`baton.TokenEvent`): where tokens come from when that changes, and
which of a step's tokens were drafts with the step's last one. The page puts these together.
"""

from dataclasses import asdict

from baton.errors import InvalidArgumentError
from baton.results.completion import Completion
from baton.types import TokenEvent
from gateway.answers import Object
from gateway.console.views import taken
from gateway.reading import Asked


def check_single(asked: Asked) -> None:
    """Raise InvalidArgumentError unless one choice of one prompt is asked for, which is what the page can show."""
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
    """Return one event of the stream. `own_text` is the token's text by itself, where the event's may be that of
    several."""
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
    """Return the request's usage, and its measured times with the predicted ones."""
    timings = output.timings
    return {
        "usage": None if output.usage is None else asdict(output.usage),
        "taken": None if timings is None else taken(timings),
        "received_ms": None if timings is None else timings.received_ns / 1e6,
        "first_token_ms": None if timings is None else timings.first_token_ns / 1e6,
        "num_resumes": output.num_resumes,
    }
