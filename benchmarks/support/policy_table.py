"""Steps of several policies at several batches and lengths, as one table: a line for each policy, a column a cell.

The forms of InfiniGen's figures 14 to 16 (Lee et al., 2024): speedup over a policy that streams all KV, and a step's
time compared with that of a device which has room for all.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.table import Table

from benchmarks.support.harness import Pairs

IDEAL, STREAMED = "device", "host"
"""The policy whose device has room for all KV, and the one that streams all of it in each step."""


@dataclass(frozen=True)
class CellTimes:
    """Step times of all policies at one batch and length, measured alternately."""

    batch: int
    context: int
    times_ms: Mapping[str, Sequence[float]]
    """Milliseconds of a step by policy, one number for each round."""

    def pairs(self, policy: str, baseline: str) -> Pairs:
        """Return the rounds of a policy paired with those of another."""
        return Pairs(list(self.times_ms[policy]), list(self.times_ms[baseline]))

    def speedup(self, policy: str) -> float:
        """Return how many times as fast as `host` a step is, in the median of the rounds."""
        return self._times(policy, STREAMED)

    def share_of_ideal(self, policy: str) -> float:
        """Return the time of a step of `device` as a part of the policy's, in the median of the rounds."""
        return self._times(policy, IDEAL)

    def _times(self, policy: str, baseline: str) -> float:
        return self.pairs(policy, baseline).quartiles(smaller_is_better=True)[1]


def policy_table(cells: Sequence[CellTimes]) -> Table:
    """Return the table of all cells: median milliseconds of a step, speedup over `host`, and share of the ideal. All
    cells have the same policies."""
    title = f"a step: ms, times as fast as {STREAMED}, part of the ideal ({IDEAL}'s step / this step)"
    table = Table("policy", *(f"{cell.batch} x {cell.context}" for cell in cells), title=title)
    for policy in cells[0].times_ms:
        table.add_row(policy, *(_entry(cell, policy) for cell in cells))
    return table


def _entry(cell: CellTimes, policy: str) -> str:
    median = cell.pairs(policy, STREAMED).our_median
    return f"{median:.1f} ms, {cell.speedup(policy):.2f} x, {cell.share_of_ideal(policy):.0%}"
