"""Streams whose deadline expires before they end."""

from collections.abc import Sequence

import pytest

from baton.calls.streams import AsyncStream
from baton.client import AsyncClient
from baton.errors import DeadlineExceededError
from baton.sampling_params import SamplingParams

NUM_TRIES = 3
DEADLINE_S = 0.5


async def late_stream(client: AsyncClient, prompt_ids: Sequence[int], params: SamplingParams) -> AsyncStream:
    """Return a stream that was ended by its deadline. Retry up to NUM_TRIES times until a stream has its usage, because
    a client waits only one second for the usage, which may arrive later on a busy machine."""
    num_tries = 0
    while True:
        stream = client.generate(token_ids=prompt_ids, params=params, deadline_s=DEADLINE_S)
        with pytest.raises(DeadlineExceededError):
            await stream.collect()
        num_tries += 1
        if stream.usage is not None or num_tries == NUM_TRIES:
            return stream
