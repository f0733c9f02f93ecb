"""The timeline shows every stage at its place in time."""

import io
from dataclasses import replace

from rich.console import Console

from baton.results.completion import Usage
from baton.results.prefill_trace import Interval, PrefillTrace, PrefixFetch, RankTiming, WidthChoice, WidthOption
from baton.results.timings import DraftCounts, SpeculationTrace, Timings
from baton.types import FinishReason, TokenRange
from deploy.commands.timeline import draw_timeline

MS = 1_000_000
TOKEN_NS = [1000 * MS, 1010 * MS, 1020 * MS]


def _rank(rank: int, start: int, end: int) -> RankTiming:
    tokens = TokenRange(100 * rank, 100 * rank + 100)
    start_ns, middle_ns, end_ns = start * MS, (start + end) // 2 * MS, end * MS
    layers = Interval(start_ns, middle_ns), Interval(middle_ns, end_ns)
    return RankTiming(rank, tokens, start_ns, end_ns, 0.01, start_ns, end_ns, 2**20, 0, layers)


def _draw(token_ns: list[int], speculation: SpeculationTrace | None = None) -> list[str]:
    console = Console(file=io.StringIO(), width=120, color_system=None)
    ranks = (_rank(0, 100, 500), _rank(1, 500, 900))
    width = WidthChoice(2, 4, 1, 3, tuple(WidthOption(width, 1 / width, 0.25 * width) for width in range(1, 5)))
    prefill = PrefillTrace(None, width, ranks, PrefixFetch("group-0", 64, 3 * 2**19, 0.25, 0.125, "it was late"))
    timings = Timings(0, 50 * MS, 100 * MS, TOKEN_NS[0], TOKEN_NS[-1], prefill=prefill)
    timings = replace(timings, speculation=speculation)
    draw_timeline(timings, Usage(200, 3, 1), [FinishReason.LENGTH], token_ns, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_each_stage_has_a_row() -> None:
    labels = [line[:18].strip() for line in _draw(TOKEN_NS) if line[:18].strip()]
    ranks = [f"rank {rank} {what}" for rank in (0, 1) for what in ("layers", "transfer")]
    assert labels[labels.index("queue, slot") :] == ["queue, slot", *ranks, "commit, 1st token", "tokens"]


def test_rank_1_is_drawn_after_rank_0() -> None:
    rows = {line[:18].strip(): line[18:86] for line in _draw(TOKEN_NS)}
    first, second = rows["rank 0 layers"], rows["rank 1 layers"]
    assert len(first.rstrip()) <= len(second) - len(second.lstrip()) + 1


def test_notes_carry_the_numbers() -> None:
    text = "\n".join(_draw(TOKEN_NS))
    assert "TTFT 1.000 s" in text
    assert "64 tokens from group-0: 1.5 MiB fetched in 0.125 s, predicted 0.250 s; it was late" in text
    assert "10.0 ms a token, 100.0 tokens/s" in text
    assert "1.0 MiB in 0.400 s" in text


def test_the_width_is_given_with_its_reason() -> None:
    text = " ".join(_draw(TOKEN_NS))
    assert "2 of 4 ranks behind 1 of 3 jobs" in text
    assert "1: 1.000 + 0.250, 2: 0.500 + 0.500" in text


def test_a_request_without_tokens_draws_nothing() -> None:
    assert _draw([]) == []


def test_no_line_is_wider_than_the_terminal() -> None:
    assert max(len(line) for line in _draw(TOKEN_NS)) <= 120


def test_drafts_have_a_line_above_the_tokens() -> None:
    plain = _draw(TOKEN_NS)
    drafted = _draw(TOKEN_NS, SpeculationTrace(2, (DraftCounts("streaming", 1, 3, 1),)))
    (line,) = set(drafted) - set(plain)
    assert line == "2 steps, drafts accepted: streaming 1 of 3 (33%; 1.0 a round)"
    assert [each for each in drafted if each != line] == plain
    assert drafted[drafted.index(line) + 1].startswith("tokens")
