"""Baton's front door: a cluster of `baton serve` in processes of its own, called over gRPC.

It is called on the caller's loop, and all instants are those at which this loop has a message.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from time import time_ns

from baton.client import AsyncClient
from baton.sampling_params import SamplingParams
from baton_lab.served_child import OwnCluster, own_cluster
from benchmarks.support.answers import Answer, Answered, Ask
from benchmarks.support.processor_time import command_of, with_descendants
from deploy.commands.record import load_record


class BatonDoor:
    """A front door (benchmarks.support.answers) of a cluster of `baton serve`."""

    def __init__(self, cluster: OwnCluster, client: AsyncClient) -> None:
        self._cluster = cluster
        self._client = client

    @classmethod
    @contextlib.asynccontextmanager
    async def opened(cls, settings: Sequence[str], say: Callable[[str], None]) -> AsyncIterator["BatonDoor"]:
        """Bring a cluster up with these settings, and end it afterwards; `say` is called with its lines. Raises
        ConfigError or UnavailableError when it does not come up."""
        options = [part for setting in settings for part in ("--set", setting)]
        async with (
            own_cluster("served-bench", options, say) as cluster,
            AsyncClient(cluster.target) as client,
        ):
            yield cls(cluster, client)

    async def answer(self, asks: Sequence[Ask]) -> Answered:
        return Answered(await asyncio.gather(*(self._one(each) for each in asks)))

    def pids(self) -> set[int]:
        own, rays, _ = self.processes()
        return own | rays

    def processes(self) -> tuple[set[int], set[int], set[int]]:
        """Return the processes of Baton itself (launcher, supervisor, orchestrator, workers), those of its Ray, and
        those of the former that are Ray's actors, whose main threads are loops of Ray."""
        record = load_record(self._cluster.name)
        assert record is not None, "a cluster that serves has a record"
        everything = with_descendants([record.launcher_pid])
        actors = {pid for pid in everything if _is_actor(command_of(pid))}
        own = with_descendants(actors) | {record.launcher_pid}
        return own, everything - own, actors

    async def _one(self, ask: Ask) -> Answer:
        """Send one request. The tokens of one step have an event each, but count as one message, received with the
        last of them. That token carries their number."""
        await asyncio.sleep(ask.at_s)  # from the load's start
        params = SamplingParams(max_tokens=ask.max_tokens, temperature=0.0, ignore_eos=True)
        asked_ns, message_ns, num_tokens = time_ns(), list[int](), 0
        async with self._client.generate(token_ids=ask.prompt, params=params) as stream:
            async for event in stream:
                if event.token is not None:
                    num_tokens += 1
                    message_ns.append(time_ns())
                    if event.drafts is not None:
                        message_ns = last_of_step(message_ns, event.drafts.num_tokens)
        if stream.usage is None or stream.usage.num_cached_tokens or stream.usage.num_attempts != 1:
            raise RuntimeError(f"a prompt was not computed once, from its first token on: {stream.usage}")
        return checked(Answer(asked_ns, tuple(message_ns), num_tokens), ask)


def last_of_step(token_ns: list[int], num_tokens: int) -> list[int]:
    """Return the instants with those of the last `num_tokens` tokens, which one step made, replaced by the latest."""
    return [*token_ns[:-num_tokens], token_ns[-1]]


def checked(answer: Answer, ask: Ask) -> Answer:
    """Return an answer that has the requested number of tokens. Raises RuntimeError for any other."""
    if answer.num_tokens != ask.max_tokens or len(answer.message_ns) < 2:
        raise RuntimeError(f"asked for {ask.max_tokens} tokens in two messages or more, and got {answer}")
    return answer


def _is_actor(title: str) -> bool:
    """Return whether a process is an actor: Ray gives it the title ray::CLASS, and others ray::IDLE or their path."""
    return title.startswith("ray::") and "Actor" in title
