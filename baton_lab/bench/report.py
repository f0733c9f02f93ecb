"""Result tables and JSON output of `baton bench`."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from baton.errors import ConfigError
from baton_lab.bench.loops import Run
from baton_lab.bench.records import Record
from baton_lab.bench.statistics import LATENCIES, Summary
from baton_lab.bench.targets import target_words
from deploy.options.screen import number_table

FORMAT = 1
"""Version of the JSON file's format."""
NAMES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "between messages",
    "e2el": "end to end",
}
_PERCENTILES = ("mean", "p50", "p90", "p99")


def lines(summary: Summary, targets: Mapping[str, float]) -> list[str]:
    """Return the results of a run as lines of text. The latencies are not included; `latency_table` shows them."""
    answered = f"{summary.num_answered} of {summary.num_requests} requests answered in {summary.seconds:.1f} s"
    tokens = f"{summary.mean_prompt_tokens:.0f} prompt and {summary.mean_output_tokens:.0f} output tokens, in the mean"
    cached = "" if math.isnan(summary.cached_share) else f"; {summary.cached_share:.0%} of the prompts' tokens cached"
    found = [
        f"{answered}: {tokens}{cached}",
        f"{summary.requests_s:.2f} requests/s, {summary.output_tokens_s:.1f} output tokens/s, "
        f"{summary.prompt_tokens_s:.1f} prompt tokens/s",
    ]
    if summary.goodput is not None and summary.good_share is not None:
        found.append(
            f"goodput {summary.goodput:.2f} requests/s, {summary.good_share:.1%} good ({target_words(targets)})"
        )
    return found


def failures(records: Sequence[Record], num_unasked: int) -> list[str]:
    """Return one line for each kind of failure, with its count and the message of its first failure."""
    kinds: dict[str, list[Record]] = {}
    for record in records:
        if record.failure:
            kinds.setdefault(record.failure, []).append(record)
    found = [f"{len(failed)} failed: {kind}, like: {failed[0].explanation}" for kind, failed in kinds.items()]
    return [*found, f"{num_unasked} turns not sent, after a failure"] if num_unasked else found


def latency_table(summary: Summary) -> Table:
    """Return a table of a run's latencies in milliseconds, one line per metric."""
    table = number_table(f"load: {summary.name}", ("ms", *_PERCENTILES), words="ms")
    for metric in LATENCIES:
        table.add_row(NAMES[metric], *(_ms(getattr(summary.latencies[metric], each)) for each in _PERCENTILES))
    table.add_row("generator's lateness", *(_ms(getattr(summary.lateness, each)) for each in _PERCENTILES))
    return table


def sweep_table(summaries: Sequence[Summary]) -> Table:
    """Return a table that compares several loads, one line per load."""
    headings = "load|req/s|tok/s|TTFT\np50|p99|TPOT\np50|p99|failed|good\n%|good\n/s"
    table = number_table("all loads, latencies in ms", headings.split("|"), words="load")
    for each in summaries:
        ttft, tpot = each.latencies["ttft"], each.latencies["tpot"]
        good = "-" if each.good_share is None else f"{each.good_share:.1%}".removesuffix("%")
        table.add_row(
            each.name,
            f"{each.requests_s:.2f}",
            f"{each.output_tokens_s:.1f}",
            *map(_ms, (ttft.p50, ttft.p99, tpot.p50, tpot.p99)),
            str(each.num_requests - each.num_answered),
            good,
            "-" if each.goodput is None else f"{each.goodput:.2f}",
        )
    return table


def check_json(path: Path) -> None:
    """Check that the JSON file can be written. Raises ConfigError otherwise. Called before the loads are sent."""
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise ConfigError(f"--json = {str(path)!r} cannot be written: choose another path")


def write_json(path: Path, settings: Mapping[str, Any], runs: Sequence[tuple[Run, Summary]]) -> None:
    """Write the settings, and the summary and request records of each run, as a JSON file. Times are in seconds. Raises
    ConfigError if the file cannot be written."""
    content = {
        "format": FORMAT,
        "settings": settings,
        "runs": [
            {"summary": _numbers(summary), "requests": [_request(each) for each in run.records]}
            for run, summary in runs
        ],
    }
    try:
        path.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
    except OSError as error:
        raise ConfigError(
            f"--json = {str(path)!r} cannot be written ({error.strerror}): choose another path"
        ) from error


def _numbers(summary: Summary) -> dict[str, Any]:
    numbers: dict[str, Any] = _finite(asdict(summary) | {"goodput": summary.goodput, "good_share": summary.good_share})
    return numbers


def _request(record: Record) -> dict[str, Any]:
    found: dict[str, Any] = _rounded(asdict(record))
    return found


def _finite(value: Any) -> Any:
    """Return the value with None in place of NaN and infinity, which JSON does not support."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _rounded(value: Any) -> Any:
    """Return the value with its floats rounded to six decimals (microseconds)."""
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    if isinstance(value, tuple | list):
        return [_rounded(each) for each in value]
    return round(value, 6) if isinstance(value, float) else value


def _ms(seconds: float) -> str:
    if math.isnan(seconds):
        return "-"
    return f"{seconds * 1e3:.1f}" if seconds < 10 else f"{seconds * 1e3:.0f}"
