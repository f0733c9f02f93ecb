"""Sends the loads of one command to a server, one after the other, and prints the results of each. Runs on the event
loop."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from rich.console import Console

from baton.process.clock import SystemClock
from baton.process.garbage import collect_all, collect_rarely
from baton_lab.bench import report
from baton_lab.bench.conversations import Conversation, Shape, conversations, replayed
from baton_lab.bench.loops import Arrivals, Generator, Load, Run, Users
from baton_lab.bench.parsed import Loads, within
from baton_lab.bench.passages import Passages
from baton_lab.bench.probing import probe
from baton_lab.bench.records import Record
from baton_lab.bench.server import Server, Style
from baton_lab.bench.statistics import Summary, doubts, summarize
from deploy.options.screen import progress

_REFRESH_S = 0.5
"""Minimum time in seconds between two updates of the progress bar. Frequent updates would delay the measured
requests."""
_TICKS_A_SECOND = 10


@dataclass(frozen=True)
class Asked:
    """Parsed options of one `baton bench` command."""

    style: Style
    shape: Shape
    loads: Loads
    targets: Mapping[str, float]
    """Latency targets in seconds by metric. A request that meets all of them counts as good."""
    seed: int


Runs = list[tuple[Run, Summary]]


class Session:
    """Runs the loads of one command. Prints the results to `out`, and progress and warnings to `err`."""

    def __init__(self, asked: Asked, passages: Passages, out: Console, err: Console) -> None:
        self._asked = asked
        self._passages = passages
        self._out = out
        self._err = err
        self._clock = SystemClock()

    async def run(self, server: Server) -> Runs:
        """Send all loads one after the other, and print the results of each load when it has ended. Return the runs of
        all loads.

        Raises UnavailableError if the server does not answer the requests that are sent before the first load. Raises
        ConfigError if all passages of the text have been used.
        """
        await probe(server, self._passages, self._clock.now_s)
        shape, found = within(self._asked.shape, server.about.context_tokens), Runs()
        self._say(f"{server.about.model}: {self._passages.tokens_per_word:.2f} tokens a word, seed {self._asked.seed}")
        for number, load in enumerate(self._asked.loads.loads):
            run = await self._send(server, load, self._made(shape, number))
            summary = summarize(run, self._asked.targets)
            self._show(run, summary)
            found.append((run, summary))
        if len(found) > 1:
            self._out.print(report.sweep_table([summary for _, summary in found]))
        return found

    async def _send(self, server: Server, load: Load, made: Iterator[Conversation]) -> Run:
        collect_rarely()
        try:
            with self._shown(load) as ended:
                return await Generator(server, self._clock, ended).run(load, made)
        finally:
            collect_all()

    def _made(self, shape: Shape, number: int) -> Iterator[Conversation]:
        """Return the conversations of load `number`."""
        trace = self._asked.loads.trace
        if trace is None:
            return conversations(self._passages, shape, self._asked.seed)
        return replayed(self._passages, trace, shape, number)

    def _show(self, run: Run, summary: Summary) -> None:
        self._out.print(report.latency_table(summary))
        for line in report.lines(summary, self._asked.targets):
            self._out.print(line, markup=False, highlight=False, soft_wrap=True)
        for line in report.failures(run.records, run.num_unasked):
            self._out.print(line, markup=False, highlight=False, soft_wrap=True)
        for line in doubts(summary, may_end_early=not self._asked.style.ignores_eos):
            self._say(f"warning: {line}")
        self._out.print()

    def _say(self, line: str) -> None:
        self._err.print(line, markup=False, highlight=False, soft_wrap=True)

    @contextlib.contextmanager
    def _shown(self, load: Load) -> Iterator[Callable[[Record], None]]:
        """Show a progress bar of the load's requests, or of its seconds if only time limits the load. Yield a function
        to call with each record."""
        num = len(load.at_s) if isinstance(load, Arrivals) else load.num_conversations
        if num is not None:
            total = num * self._asked.shape.num_turns
        else:
            assert isinstance(load, Users), "an open loop knows its arrivals"
            total = round(load.seconds * _TICKS_A_SECOND)
        num_ended = drawn = 0
        drawn_s = self._clock.now_s()
        with progress(self._err, load.name, total) as advance:

            def ended(record: Record) -> None:
                nonlocal num_ended, drawn, drawn_s
                num_ended += 1
                now_s = self._clock.now_s()
                if now_s - drawn_s >= _REFRESH_S:
                    done = int(record.end_s * _TICKS_A_SECOND) if num is None else num_ended
                    advance(max(done - drawn, 0))
                    drawn, drawn_s = max(done, drawn), now_s

            yield ended
