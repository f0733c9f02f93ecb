"""Client of a Baton cluster for benchmarks. The cluster runs `baton serve` in separate processes, and is called over
gRPC.

The calls run on the caller's event loop. Times are those at which this loop receives a message.
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
    """Client interface of a cluster of `baton serve`. Implements FrontDoor (`benchmarks.support.answers`)."""

    def __init__(self, cluster: OwnCluster, client: AsyncClient) -> None:
        self._cluster = cluster
        self._client = client

    @classmethod
    @contextlib.asynccontextmanager
    async def opened(cls, settings: Sequence[str], say: Callable[[str], None]) -> AsyncIterator["BatonDoor"]:
        """Context manager. Start a cluster with `settings`, and yield its client interface. The cluster is ended on
        exit. `say` is called with each line that the cluster prints. Raises ConfigError or UnavailableError if the
        cluster does not start."""
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
        """Return three sets of process ids. First, Baton's own processes: launcher, supervisor, orchestrator and
        workers. Second, Ray's processes. Third, those of Baton's own processes that are Ray actors; their main threads
        run Ray's loops."""
        record = load_record(self._cluster.name)
        assert record is not None, "a cluster that serves has a record"
        everything = with_descendants([record.launcher_pid])
        actors = {pid for pid in everything if _is_actor(command_of(pid))}
        own = with_descendants(actors) | {record.launcher_pid}
        return own, everything - own, actors

    async def _one(self, ask: Ask) -> Answer:
        """Send one request. A step with accepted drafts sends one event per token. They count as one message, received
        with the last of them, whose `drafts` gives their number."""
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
    """Return a copy of `token_ns` in which a step counts as one message. The last `num_tokens` times, which are those
    of the tokens of one step, are replaced by the latest of them."""
    return [*token_ns[:-num_tokens], token_ns[-1]]


def checked(answer: Answer, ask: Ask) -> Answer:
    """Return the answer unchanged. Raises RuntimeError if it does not have the requested number of tokens, or has fewer
    than two messages."""
    if answer.num_tokens != ask.max_tokens or len(answer.message_ns) < 2:
        raise RuntimeError(f"asked for {ask.max_tokens} tokens in two messages or more, and got {answer}")
    return answer


def _is_actor(title: str) -> bool:
    """Return whether a process title is that of a Ray actor. Ray sets it to ray::CLASS; other processes have ray::IDLE
    or their path."""
    return title.startswith("ray::") and "Actor" in title
