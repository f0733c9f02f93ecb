"""Table of the steps of several policies in several cells: one line per policy, one column per batch size and length.

Shows the metrics of InfiniGen's figures 14 to 16 (Lee et al., 2024): speedup over a policy that streams all KV, and the
step time relative to a device that has room for all KV.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.table import Table

from benchmarks.support.harness import Pairs

IDEAL, STREAMED = "device", "host"
"""IDEAL: policy whose device has room for all KV. STREAMED: policy that streams all KV in each step."""


@dataclass(frozen=True)
class CellTimes:
    """Step times of all policies for one batch size and length, measured alternately."""

    batch: int
    context: int
    times_ms: Mapping[str, Sequence[float]]
    """Milliseconds of a step by policy, one value per round."""

    def pairs(self, policy: str, baseline: str) -> Pairs:
        """Return the rounds of a policy paired with those of a baseline."""
        return Pairs(list(self.times_ms[policy]), list(self.times_ms[baseline]))

    def speedup(self, policy: str) -> float:
        """Return the median speedup of a step over `host`."""
        return self._times(policy, STREAMED)

    def share_of_ideal(self, policy: str) -> float:
        """Return the median of (step time of `device` / step time of the policy)."""
        return self._times(policy, IDEAL)

    def _times(self, policy: str, baseline: str) -> float:
        return self.pairs(policy, baseline).quartiles(smaller_is_better=True)[1]


def policy_table(cells: Sequence[CellTimes]) -> Table:
    """Return a table of all cells: median milliseconds of a step, speedup over `host`, and `device`'s step time as a
    fraction of it. All cells must have the same policies."""
    title = f"a step: ms, times as fast as {STREAMED}, part of the ideal ({IDEAL}'s step / this step)"
    table = Table("policy", *(f"{cell.batch} x {cell.context}" for cell in cells), title=title)
    for policy in cells[0].times_ms:
        table.add_row(policy, *(_entry(cell, policy) for cell in cells))
    return table


def _entry(cell: CellTimes, policy: str) -> str:
    median = cell.pairs(policy, STREAMED).our_median
    return f"{median:.1f} ms, {cell.speedup(policy):.2f} x, {cell.share_of_ideal(policy):.0%}"
