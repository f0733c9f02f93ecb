"""Streams whose deadline passes before they end."""

from collections.abc import Sequence

import pytest

from baton.calls.streams import AsyncStream
from baton.client import AsyncClient
from baton.errors import DeadlineExceededError
from baton.sampling_params import SamplingParams

NUM_TRIES = 3
DEADLINE_S = 0.5


async def late_stream(client: AsyncClient, prompt_ids: Sequence[int], params: SamplingParams) -> AsyncStream:
    """A stream that has ended by its deadline, with its usage in one of some tries: a client listens for a second more,
    and a crowded machine may hold the usage up for longer."""
    num_tries = 0
    while True:
        stream = client.generate(token_ids=prompt_ids, params=params, deadline_s=DEADLINE_S)
        with pytest.raises(DeadlineExceededError):
            await stream.collect()
        num_tries += 1
        if stream.usage is not None or num_tries == NUM_TRIES:
            return stream
