"""Requests as a queue sees them: so many tokens, from whom, how urgent."""

from typing import Any

from baton.sampling_params import SamplingParams
from baton.types import RequestId
from orchestrator.requests.request import Request


def asking(num_tokens: int, n: int = 1, **fields: Any) -> Request:
    """A request with a prompt of that many tokens, for `n` choices; `fields` are others of `Request`."""
    return Request(RequestId("r"), (1,) * num_tokens, SamplingParams(n=n), **fields)
