"""Reads traces from files in three public formats. The first line of a file determines its format.

    Azure LLM inference   CSV: TIMESTAMP, ContextTokens, GeneratedTokens; times like 2023-11-16 18:15:46.6805900
    BurstGPT              CSV: Timestamp, Model, Request tokens, Response tokens, Total tokens, Log Type; seconds
    Mooncake              JSON lines: timestamp in ms, input_length, output_length, hash_ids of 512-token blocks

Times are relative to the first request. Requests without an answer (BurstGPT contains failed ones) are omitted.
"""

import csv
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from baton.errors import InvalidArgumentError
from baton_lab.traffic.traces.trace import Trace

MOONCAKE_BLOCK_TOKENS = 512


@dataclass(frozen=True)
class _Line:
    """One request of a trace file."""

    time_s: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()


def read_trace(path: Path) -> Trace:
    """Read a trace file in any of the supported formats.

    Raises InvalidArgumentError if the file cannot be read, has another format, or contains an invalid value. The
    message names the file and the line.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgumentError(f"{path}: cannot be read ({error}): give a trace file") from error
    lines = sorted(_parse(text, path), key=lambda line: line.time_s)
    answered = [line for line in lines if line.output_tokens and line.prompt_tokens]
    if not answered:
        raise InvalidArgumentError(f"{path}: it has no request with a prompt and an answer: give another trace file")
    begin_s = answered[0].time_s
    return Trace(
        path.name,
        np.array([line.time_s - begin_s for line in answered]),
        np.array([line.prompt_tokens for line in answered], dtype=np.int64),
        np.array([line.output_tokens for line in answered], dtype=np.int64),
        tuple(line.blocks for line in answered) if any(line.blocks for line in answered) else (),
        MOONCAKE_BLOCK_TOKENS,
    )


def _parse(text: str, path: Path) -> list[_Line]:
    first = text.lstrip()[:1]
    rows: Iterable[Mapping[str, Any]]
    if first == "{":
        return _each(_json_lines(text, path), _mooncake, path)
    header = text.partition("\n")[0]
    rows = csv.DictReader(text.splitlines())
    if "ContextTokens" in header:
        return _each(enumerate(rows, start=2), _azure, path)
    if "Request tokens" in header:
        return _each(enumerate(rows, start=2), _burst_gpt, path)
    raise InvalidArgumentError(
        f"{path}: its first line is of no known format: give a CSV file with TIMESTAMP, ContextTokens, GeneratedTokens "
        "(Azure) or Timestamp, Request tokens, Response tokens (BurstGPT), or Mooncake's JSON lines"
    )


def _json_lines(text: str, path: Path) -> Iterable[tuple[int, Mapping[str, Any]]]:
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            try:
                parsed = json.loads(line)
            except json.JSONDecodeError as error:
                raise InvalidArgumentError(
                    f"{path}:{number}: is not valid JSON ({error.msg}): correct the line"
                ) from error
            yield number, parsed


def _each(
    rows: Iterable[tuple[int, Mapping[str, Any]]], parse: Callable[[Mapping[str, Any]], _Line], path: Path
) -> list[_Line]:
    lines = []
    for number, row in rows:
        try:
            lines.append(parse(row))
        except (KeyError, TypeError, ValueError) as error:
            what = f"{error.args[0]} is missing" if isinstance(error, KeyError) else str(error)
            raise InvalidArgumentError(f"{path}:{number}: {what}: correct or remove the line") from error
    return lines


def _azure(row: Mapping[str, Any]) -> _Line:
    date, _, fraction = str(row["TIMESTAMP"]).strip().partition(".")
    digits = fraction.partition("+")[0].rstrip("Z")
    seconds = datetime.fromisoformat(f"{date.rstrip('Z')}+00:00").timestamp()
    return _Line(seconds + float(f"0.{digits or 0}"), _count(row, "ContextTokens"), _count(row, "GeneratedTokens"))


def _burst_gpt(row: Mapping[str, Any]) -> _Line:
    return _Line(float(row["Timestamp"]), _count(row, "Request tokens"), _count(row, "Response tokens"))


def _mooncake(row: Mapping[str, Any]) -> _Line:
    blocks = tuple(int(each) for each in row.get("hash_ids", ()))
    return _Line(float(row["timestamp"]) / 1e3, _count(row, "input_length"), _count(row, "output_length"), blocks)


def _count(row: Mapping[str, Any], name: str) -> int:
    value = float(row[name])
    if not 0 <= value < 2**31 or value != int(value):
        raise ValueError(f"{name} = {row[name]!r} is not a number of tokens")
    return int(value)
