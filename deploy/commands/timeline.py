"""Draws the timeline of a request in the terminal: one line for each stage and each rank, with its time span."""

from collections.abc import Sequence

from rich.console import Console, Group
from rich.text import Text

from baton.results.completion import Usage
from baton.results.prefill_trace import Interval, RankTiming
from baton.results.timings import Timings
from baton.types import FinishReason

_LABEL_WIDTH = 18
_NOTE_WIDTH = 34
_RANK_STYLES = ("cyan", "magenta", "green", "yellow", "blue", "red")
_LAYER_MARKS = ("\u2588", "\u2593")
"""Characters that mark even and odd layers in a rank's line. They differ, so that the boundary between two layers is
visible."""


def draw_timeline(
    timings: Timings, usage: Usage, reasons: Sequence[FinishReason], token_ns: Sequence[int], console: Console
) -> None:
    """Print the timeline of a request. `reasons` are the finish reasons of its choices, and `token_ns` the times at
    which its tokens were generated. Prints nothing if the request has no tokens."""
    if token_ns:
        lines = [_title(usage, reasons), *_prefill_rows(timings, token_ns[0], console.width)]
        if timings.speculation is not None:
            lines.append(Text(timings.speculation.text, style="dim"))
        console.print(Group(*lines, *_token_rows(token_ns, console.width)))


def _prefill_rows(timings: Timings, first_ns: int, width: int) -> list[Text]:
    """Return the lines of the timeline from the request's arrival to its first token."""
    prefill = timings.prefill
    pushed_ns = max((rank.push_end_ns for rank in prefill.ranks), default=first_ns)
    shown = Interval(timings.received_ns, max(first_ns, pushed_ns))
    scale = _Scale(shown, _bar_width(width))
    queue = Interval(timings.received_ns, timings.leased_ns)
    lines = [] if prefill.placement is None else [Text(prefill.placement.text, style="dim")]
    lines += [] if prefill.width is None else [Text(prefill.width.reason, style="dim")]
    lines += [] if prefill.fetch is None else [Text(prefill.fetch.text, style="dim")]
    lines.append(_row("queue, slot", scale.bar([queue], "\u2591", "white"), f"{_seconds(queue) * 1e3:.0f} ms"))
    for rank in prefill.ranks:
        lines.extend(_rank_rows(rank, scale))
    if not prefill.ranks:
        local = Interval(timings.leased_ns, first_ns)
        lines.append(_row("local prefill", scale.bar([local], "\u2588", "cyan"), f"{_seconds(local):.3f} s"))
    commit = scale.point(first_ns, "\u25c6", "bold yellow")
    lines.append(_row("commit, 1st token", commit, f"TTFT {(first_ns - timings.received_ns) / 1e9:.3f} s"))
    return [*lines, _axis(scale)]


def _title(usage: Usage, reasons: Sequence[FinishReason]) -> Text:
    retried = f", {usage.num_attempts} attempts" if usage.num_attempts > 1 else ""
    cached = f" ({usage.num_cached_tokens} of them cached)" if usage.num_cached_tokens else ""
    counts = f"{usage.num_prompt_tokens} prompt tokens{cached}, {usage.num_output_tokens} output tokens"
    return Text(f"{counts}{retried}, {', '.join(reason.value for reason in dict.fromkeys(reasons))}", style="bold")


def _rank_rows(rank: RankTiming, scale: "_Scale") -> list[Text]:
    style = _RANK_STYLES[rank.rank % len(_RANK_STYLES)]
    layers = Text()
    for index, layer in enumerate(rank.layers):
        layers = _overlay(layers, scale.bar([layer], _LAYER_MARKS[index % 2], style))
    push = Interval(rank.push_start_ns, rank.push_end_ns)
    run_s = _seconds(Interval(rank.start_ns, rank.end_ns))
    computed = f"{len(rank.tokens)} tok {run_s:.3f} s, waited {rank.wait_s:.3f}"
    by = " by shared memory" if rank.num_bytes_shared else ""
    pushed = f"{rank.num_bytes_pushed / 2**20:.1f} MiB in {_seconds(push):.3f} s{by}"
    return [
        _row(f"rank {rank.rank} layers", layers, computed),
        _row(f"rank {rank.rank} transfer", scale.bar([push], "\u2592", style), pushed),
    ]


def _token_rows(token_ns: Sequence[int], width: int) -> list[Text]:
    """Return the lines of the tokens, on a separate time scale."""
    if len(token_ns) < 2:
        return []
    scale = _Scale(Interval(token_ns[0], token_ns[-1]), _bar_width(width))
    marks = Text()
    for ns in token_ns:
        marks = _overlay(marks, scale.point(ns, "\u2502", "green"))
    per_token_ms = _seconds(scale.interval) / (len(token_ns) - 1) * 1e3
    rate = f"{per_token_ms:.1f} ms a token, {1e3 / per_token_ms:.1f} tokens/s"
    return [_row("tokens", marks, rate), _axis(scale)]


def _row(label: str, bar: Text, note: str) -> Text:
    return Text.assemble(f"{label:<{_LABEL_WIDTH}}", bar, "  ", (note, "dim"), no_wrap=True)


def _bar_width(width: int) -> int:
    return max(20, width - _LABEL_WIDTH - _NOTE_WIDTH)


def _seconds(interval: Interval) -> float:
    return (interval.end_ns - interval.start_ns) / 1e9


def _axis(scale: "_Scale") -> Text:
    end = f"{_seconds(scale.interval):.3f} s"
    return Text(" " * _LABEL_WIDTH + "0" + end.rjust(scale.width - 1, "\u2500"), style="dim", no_wrap=True)


def _overlay(below: Text, above: Text) -> Text:
    """Return `below`, covered by `above` in every cell where `above` is not blank."""
    out = Text()
    for index in range(max(len(below), len(above))):
        source = above if index < len(above) and above.plain[index] != " " else below
        out.append_text(source[index] if index < len(source) else Text(" "))
    return out


class _Scale:
    """Conversion from wall-clock time to character positions in a line."""

    def __init__(self, interval: Interval, width: int) -> None:
        self.interval = interval
        self.width = width

    def cell(self, ns: int) -> int:
        length = max(self.interval.end_ns - self.interval.start_ns, 1)
        place = (ns - self.interval.start_ns) * self.width // length
        return min(max(place, 0), self.width - 1)

    def bar(self, intervals: Sequence[Interval], mark: str, style: str) -> Text:
        cells = [" "] * self.width
        for interval in intervals:
            first, last = self.cell(interval.start_ns), self.cell(interval.end_ns)
            cells[first : last + 1] = [mark] * (last + 1 - first)
        return Text("".join(cells), style=style)

    def point(self, ns: int, mark: str, style: str) -> Text:
        cells = [" "] * self.width
        cells[self.cell(ns)] = mark
        return Text("".join(cells), style=style)
