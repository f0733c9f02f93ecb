"""Scenes of the demo: requests with streamed text, a table of several running requests, and the state of the groups."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from functools import partial

from rich.console import Console
from rich.live import Live
from rich.table import Column, Table
from rich.text import Text

from baton.calls.cluster_state import ClusterState, GenerationStatus
from baton.calls.streams import AsyncStream
from baton.client import AsyncClient
from baton.errors import BatonError
from deploy.commands.generate import describe
from deploy.commands.timeline import draw_timeline

QUESTION = "Why is exercise good for you? Answer in two sentences."
QUESTIONS = (
    "What is the capital of Japan?",
    "What is a prime number? Answer in one sentence.",
    "Who was the first person to walk on the Moon?",
    "What is photosynthesis? Answer in one sentence.",
    "What is the chemical formula of water?",
    "How does the heart work? Answer in two sentences.",
    "What does a dentist do? Answer in one sentence.",
    "Why is water important? Answer in two sentences.",
)
"""Questions that the demo sends at the same time. A small model gives sensible answers to them, even in bf16, where
logits have errors of up to 0.3."""
_CHAT = (
    "One question to a small model. Its answer appears as it is made; the line below it says how long the request took "
    "and how much of that went by before the first token."
)
_PASSAGE = (
    "A prompt of many tokens. Each rank of the chain prefills a part of it and passes the keys and values on, layer by "
    "layer. The timeline shows it: each rank's layers and its transfer to the generation engine overlap."
)
_AT_ONCE = (
    "Each step of the generation engine makes tokens of all streams. Compare the rate of all together with a single "
    "stream's; the timeline shows how long the last one waited."
)
_STATE = "The requests have ended. Each slot of the engine is free again, and nothing is leaked."
_ANSWER_TOKENS = 96
_PASSAGE_TOKENS = 64
_SHORT_TOKENS = 48
_DEADLINE_S = 120.0
_SHOWN_OF_PASSAGE = 240
"""Number of characters at the end of the passage that are shown. The model's continuation follows them."""
_IDLE_LOOKS = 30
"""Maximum number of checks until the cluster is idle. After them, its state is shown even if it is not idle."""
_LOOK_S = 0.5
"""Seconds between two checks of the cluster's state."""
_REFRESHES_A_SECOND = 8
_TAIL = 60
"""Number of characters that the table shows of a running request's text, from its end."""


class DemoRequest:
    """Request that the demo has sent. One task reads its stream; any thread may display it."""

    def __init__(self, asked: str, stream: AsyncStream) -> None:
        self.asked = asked
        self.text = ""
        self._stream = stream
        self.token_ns: list[int] = []
        """Time at which each token was sampled, by the server's clock, in nanoseconds since the Unix epoch."""

    @property
    def num_tokens(self) -> int:
        """Number of output tokens received so far."""
        return len(self.token_ns)

    @property
    def first_token_s(self) -> float:
        """Time to first token in seconds, measured by the server; 0 until the request has ended."""
        timings = self._stream.timings
        return (timings.time_to_first_token_s or 0.0) if timings is not None else 0.0

    @property
    def pace(self) -> str:
        """Text with the number of tokens received so far, and with the tokens per second after the first token."""
        num_after_first = len(self.token_ns) - 1
        if num_after_first < 1:
            return f"{self.num_tokens} tokens"
        return (
            f"{self.num_tokens} tokens, {num_after_first / (self.token_ns[-1] - self.token_ns[0]) * 1e9:.1f} a second"
        )

    async def follow(self) -> AsyncIterator[str]:
        """Yield the answer's text in pieces, as it arrives."""
        async for event in self._stream:
            if event.token is not None:
                self.token_ns.append(event.unix_ns)
            self.text += event.text
            yield event.text

    async def finish(self) -> None:
        """Read the stream until the request has ended."""
        async for _ in self.follow():
            pass

    async def show(self, console: Console) -> None:
        """Print the answer's text as it arrives, and then the request's timings."""
        async for text in self.follow():
            console.print(text, end="", markup=False, soft_wrap=True)
        console.print()
        console.print(describe(self._stream.output), style="dim")

    def draw_timeline(self, console: Console) -> None:
        """Draw the timeline of the request. The request must have ended."""
        output = self._stream.output
        assert output.finish is not None and output.usage is not None and output.timings is not None
        draw_timeline(output.timings, output.usage, (output.finish,), self.token_ns, console)


def announce(console: Console, title: str, text: str) -> None:
    """Print the title and the explanation of a scene."""
    console.rule(title, align="left")
    console.print(text, style="italic")


async def show_chat(client: AsyncClient, console: Console) -> None:
    """Send one question as a chat, and show the answer as it arrives."""
    announce(console, "A chat", _CHAT)
    console.print(QUESTION, style="bold")
    messages = [{"role": "user", "content": QUESTION}]
    stream = client.generate(messages=messages, max_tokens=_ANSWER_TOKENS, deadline_s=_DEADLINE_S)
    await DemoRequest(QUESTION, stream).show(console)


async def show_passage(client: AsyncClient, console: Console, passage: str) -> None:
    """Let the model continue a long passage, and draw the timeline of the request. All prefill ranks prefill the
    passage."""
    announce(console, "A long passage, prefilled by all ranks, and how the model continues it", _PASSAGE)
    console.print(f"... {passage[-_SHOWN_OF_PASSAGE:].strip()}", style="dim", end="", markup=False, soft_wrap=True)
    stream = client.generate(passage, max_tokens=_PASSAGE_TOKENS, deadline_s=_DEADLINE_S)
    request = DemoRequest("the passage", stream)
    await request.show(console)
    request.draw_timeline(console)


async def show_all_at_once(client: AsyncClient, console: Console) -> None:
    """Send all questions at the same time. Draw the timeline of the request that waited longest for its first token."""
    announce(console, f"{len(QUESTIONS)} streams at once, and the timeline of the one that waited longest", _AT_ONCE)
    requests = []
    for question in QUESTIONS:
        messages = [{"role": "user", "content": question}]
        stream = client.generate(messages=messages, max_tokens=_SHORT_TOKENS, deadline_s=_DEADLINE_S)
        requests.append(DemoRequest(question, stream))
    await _follow_all(requests, console)
    max(requests, key=lambda request: request.first_token_s).draw_timeline(console)


async def show_state(client: AsyncClient, console: Console) -> None:
    """Wait until the cluster is idle, and show its slots and leaked resources. Raises BatonError if slots or jobs
    leaked."""
    announce(console, "What the cluster holds now", _STATE)
    state = await _idle_state(client)
    console.print(_group_table(state))
    if num_leaked := sum(group.num_leaked for group in state.groups):
        raise BatonError(f"{num_leaked} slots or jobs leaked: see Ray's logs")


async def _idle_state(client: AsyncClient) -> ClusterState:
    """Return the cluster's state as soon as every engine reports that all its slots are free, or after `_IDLE_LOOKS`
    checks. Slots stay in use after the last token, because answers are stored first."""
    state = await client.cluster_state()
    for _ in range(_IDLE_LOOKS):
        engines = [group.generation for group in state.groups if group.role == "generate"]
        if all(each is not None and each.num_free == each.num_slots for each in engines):
            break
        await asyncio.sleep(_LOOK_S)
        state = await client.cluster_state()
    return state


async def _follow_all(requests: Sequence[DemoRequest], console: Console) -> None:
    """Read all streams to their ends, then print the texts. Meanwhile, a terminal shows the end of each text. The first
    failure cancels the other requests and is raised."""
    tasks = [asyncio.create_task(request.finish()) for request in requests]
    rate, table = _REFRESHES_A_SECOND, partial(_running_table, requests)
    with Live(console=console, refresh_per_second=rate, transient=True, get_renderable=table):
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    for request in requests:
        console.print(Text.assemble((request.asked, "bold"), (f"  {request.pace}", "dim")))
        console.print(" ".join(request.text.split()), markup=False, soft_wrap=True)
    num_tokens = sum(request.num_tokens for request in requests)
    elapsed_s = (max(each.token_ns[-1] for each in requests) - min(each.token_ns[0] for each in requests)) / 1e9
    console.print(
        f"together {num_tokens} tokens in {elapsed_s:.2f} s, {num_tokens / elapsed_s:.0f} a second", style="dim"
    )


def _group_table(state: ClusterState) -> Table:
    """Return a table of the groups, one line per group."""
    table = Table("group", "ready", "slots", "free", "leaked", box=None)
    for group in state.groups:
        held = group.generation or GenerationStatus()
        counts = (held.num_slots, held.num_free, group.num_leaked)
        table.add_row(group.name, "yes" if group.is_ready else "no", *(str(count) for count in counts))
    return table


def _running_table(requests: Sequence[DemoRequest]) -> Table:
    """Return a table of the running requests. Each request is cut to one line, so that the table's height is
    constant."""
    table = Table("asked", Column("tokens", justify="right"), Column("the latest", no_wrap=True), box=None)
    for request in requests:
        latest = " ".join(request.text.split())[-_TAIL:]
        table.add_row(Text(request.asked), str(request.num_tokens), Text(latest))
    return table
