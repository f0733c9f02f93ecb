"""KVR-P: partitions predicted from a table of searched ones, quickly enough for every request.

A table belongs to one model on one hardware (a calibration's fingerprint). For each number of ranks it holds knots:
context lengths with the fractions of the prompt that each rank takes. Between two knots the fractions are interpolated
linearly; outside they are those of the nearest knot (KV-Runahead, ICML 2024, section 4.2). Pure, except that load and
save block on the disk.
"""

import itertools
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.errors import ConfigError
from baton.types import TokenRange
from planning import json_file
from planning.cost_model import CostModel, Protocol
from planning.partition import check_partition_request
from planning.search import as_ranges, rounded, search

KIND = "baton-partitions"
SCHEMA = 1

_SUM_TOLERANCE = 1e-6
_KNOT_SLACK = 0.005
"""Fraction by which a knot may be slower than the best partition, so that neighbouring knots resemble each other
(`search`)."""


@dataclass(frozen=True)
class Knot:
    """The partition that was searched for one context length."""

    num_tokens: int
    fractions: tuple[float, ...]
    """Fractions of the prompt, one for each rank, in rank order; they sum to 1."""


@dataclass(frozen=True)
class PartitionTable:
    """Searched partitions (knots) by number of ranks, each list ascending by context length."""

    fingerprint: str
    """Fingerprint of the calibration that the partitions were searched with."""
    knots: Mapping[int, tuple[Knot, ...]]

    def __post_init__(self) -> None:
        for num_ranks, knots in self.knots.items():
            where = f"partition table, {num_ranks} ranks"
            if not knots:
                raise ConfigError(f"{where}: no knots: search at least one context length")
            if any(left.num_tokens >= right.num_tokens for left, right in itertools.pairwise(knots)):
                raise ConfigError(f"{where}: num_tokens of the knots do not ascend: sort them, each once")
            for knot in knots:
                _check(knot, num_ranks, where)

    def fractions(self, num_tokens: int, num_ranks: int) -> tuple[float, ...]:
        """Return the fractions for `num_tokens`, interpolated between knots. Raises ConfigError when the table has no
        knots for this number of ranks."""
        knots = self.knots.get(num_ranks)
        if knots is None:
            known = ", ".join(str(ranks) for ranks in sorted(self.knots)) or "none"
            raise ConfigError(f"partition table: no knots for {num_ranks} ranks (it has {known}): search them first")
        at = bisect_left([knot.num_tokens for knot in knots], num_tokens)
        if at == 0 or at == len(knots):
            return knots[min(at, len(knots) - 1)].fractions
        low, high = knots[at - 1], knots[at]
        share = (num_tokens - low.num_tokens) / (high.num_tokens - low.num_tokens)
        return tuple(x + share * (y - x) for x, y in zip(low.fractions, high.fractions, strict=True))


class PredictedPartitioner:
    """KVR-P over a table. A prompt with fewer tokens than ranks takes one rank a token."""

    def __init__(self, table: PartitionTable) -> None:
        self.table = table

    def partition(self, tokens: TokenRange, num_ranks: int) -> tuple[TokenRange, ...]:
        """Return one consecutive, non-empty range a rank, in rank order, covering `tokens`; fewer when there are fewer
        tokens. Raises InvalidArgumentError for no tokens or no ranks, ConfigError when the table has no knots for this
        number of ranks."""
        check_partition_request(tokens, num_ranks)
        if len(tokens) <= num_ranks:
            return as_ranges([1] * len(tokens), tokens.start)
        if num_ranks == 1:
            return (tokens,)
        return as_ranges(rounded(self.table.fractions(len(tokens), num_ranks), len(tokens)), tokens.start)


def build_table(
    fingerprint: str, cost: CostModel, protocol: Protocol, *, contexts: Sequence[int], ranks: Sequence[int]
) -> PartitionTable:
    """Search a knot for each context length and each number of ranks above 1, unless there are fewer tokens than
    ranks."""
    knots = {}
    for num_ranks in sorted({each for each in ranks if each > 1}):
        searched = []
        for num_tokens in sorted({each for each in contexts if each >= num_ranks}):
            chunks = search(num_tokens, num_ranks, cost, protocol, slack=_KNOT_SLACK)
            searched.append(Knot(num_tokens, tuple(chunk / num_tokens for chunk in chunks)))
        knots[num_ranks] = tuple(searched)
    return PartitionTable(fingerprint, knots)


def save(table: PartitionTable, path: Path) -> None:
    """Write the table to a file, replacing one that is there. Raises ConfigError when it cannot be written."""
    knots = {
        str(num_ranks): [{"num_tokens": knot.num_tokens, "fractions": knot.fractions} for knot in row]
        for num_ranks, row in table.knots.items()
    }
    json_file.write(path, json_file.dump(KIND, SCHEMA, {"fingerprint": table.fingerprint, "knots": knots}))


def load(path: Path, fingerprint: str | None = None) -> PartitionTable:
    """Read a table from a file that `save` wrote. Raises ConfigError that names file, field and remedy, also for a
    table made for another model or hardware than `fingerprint`, unless that is None."""
    data = json_file.read(path, KIND, SCHEMA)
    where = str(path)
    found = data.get("fingerprint")
    if not isinstance(found, str):
        raise ConfigError(f"{where}: fingerprint = {found!r} is no text: search the table anew")
    if fingerprint not in (None, found):
        raise ConfigError(
            f"{where}: made for model and hardware {found}, and these are {fingerprint}: search the table anew"
        )
    knots = json_file.section(data, "knots", where)
    try:
        rows = {int(num_ranks): tuple(_knot(each) for each in row) for num_ranks, row in knots.items()}
    except (TypeError, ValueError, KeyError) as error:
        raise ConfigError(f"{where}: knots are no lists of num_tokens and fractions: search the table anew") from error
    try:
        return PartitionTable(found, rows)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def _knot(fields: dict[str, Any]) -> Knot:
    return Knot(int(fields["num_tokens"]), tuple(float(each) for each in fields["fractions"]))


def _check(knot: Knot, num_ranks: int, where: str) -> None:
    where = f"{where}, {knot.num_tokens} tokens"
    if len(knot.fractions) != num_ranks:
        raise ConfigError(f"{where}: {len(knot.fractions)} fractions: give one a rank")
    if not all(fraction > 0 for fraction in knot.fractions):
        raise ConfigError(f"{where}: fractions must be above 0: every rank computes something")
    if not abs(sum(knot.fractions) - 1) <= _SUM_TOLERANCE:
        raise ConfigError(f"{where}: fractions sum to {sum(knot.fractions):.6f}: make that 1")
