"""Served cluster on Ray as one side of a comparison, called over gRPC. Runs on the benchmark's event loop."""

import asyncio
from time import time_ns

from baton.client import AsyncClient
from baton.results.timings import Timings
from baton.sampling_params import SamplingParams
from benchmarks.support.streams import Load, Measured, StreamTimes


class ServedSide:
    """Side of a comparison (`benchmarks.support.streams`) that calls a running cluster through a client."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def measure(self, load: Load) -> Measured:
        params = SamplingParams(max_tokens=load.max_tokens, ignore_eos=True)
        asked = (self._follow(prompt, params) for prompt in load.prompts)
        return Measured(tuple([times for times, _ in await asyncio.gather(*asked)]))

    async def spans(self, prompt: tuple[int, ...]) -> dict[str, float]:
        """Send one request for one token. Return the milliseconds of each stage by name, from the call to the token's
        arrival. All stages except `chain` are overhead of serving."""
        times, timings = await self._follow(prompt, SamplingParams(max_tokens=1, ignore_eos=True))
        return split(times, timings)

    async def _follow(self, prompt: tuple[int, ...], params: SamplingParams) -> tuple[StreamTimes, Timings]:
        asked_ns, first_ns = time_ns(), 0
        token_ns = []
        async with self._client.generate(token_ids=prompt, params=params) as stream:
            async for event in stream:
                if event.token is not None:
                    first_ns = first_ns or time_ns()
                    token_ns.append(event.unix_ns)
        assert stream.timings is not None
        return StreamTimes(asked_ns, first_ns, tuple(token_ns)), stream.timings


def split(times: StreamTimes, timings: Timings) -> dict[str, float]:
    """Split the time from sending a request to receiving its first token into consecutive stages. Return the
    milliseconds of each stage by name. All times must be from the clock of one machine."""
    instants = {
        "in": timings.received_ns,
        "queue": timings.admitted_ns,
        "reserve": timings.leased_ns,
        "dispatch": min(rank.start_ns for rank in timings.prefill.ranks),
        "chain": max(rank.end_ns for rank in timings.prefill.ranks),
        "push_tail": max(max(rank.push_end_ns, rank.end_ns) for rank in timings.prefill.ranks),
        "commit_join": timings.first_token_ns,
        "out": times.first_ns,
    }
    spans, before_ns = {}, times.asked_ns
    for name, ns in instants.items():
        spans[name] = (ns - before_ns) / 1e6
        before_ns = ns
    return spans
