"""Requests for tests of the request queue."""

from typing import Any

from baton.sampling_params import SamplingParams
from baton.types import RequestId
from orchestrator.requests.request import Request


def asking(num_tokens: int, n: int = 1, **fields: Any) -> Request:
    """Return a request for `n` choices with a prompt of `num_tokens` tokens. `fields` sets further fields of
    `Request`."""
    return Request(RequestId("r"), (1,) * num_tokens, SamplingParams(n=n), **fields)
