"""Table that compares the step times of several residency policies: one line per policy, one column per batch size and
length.

It shows the metrics of figures 14 to 16 in the InfiniGen paper (Lee et al., 2024): the speedup over a policy that
streams all KV from host memory, and the step time relative to a device that has memory for all KV.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.table import Table

from benchmarks.support.harness import Pairs

IDEAL, STREAMED = "device", "host"
"""Names of the two reference policies. IDEAL keeps all KV in device memory. STREAMED keeps it in host memory, and
streams all of it to the device in each step."""


@dataclass(frozen=True)
class CellTimes:
    """Step times of all policies for one batch size and length, measured alternately."""

    batch: int
    context: int
    times_ms: Mapping[str, Sequence[float]]
    """Step times in milliseconds by policy, one value per round."""

    def pairs(self, policy: str, baseline: str) -> Pairs:
        """Return the step times of `policy` and of `baseline`, paired by round."""
        return Pairs(list(self.times_ms[policy]), list(self.times_ms[baseline]))

    def speedup(self, policy: str) -> float:
        """Return the median, over the rounds, of the ratio of the step time of the policy `host` to the step time of
        `policy`."""
        return self._times(policy, STREAMED)

    def share_of_ideal(self, policy: str) -> float:
        """Return the median, over the rounds, of the ratio of the step time of the policy `device` to the step time of
        `policy`."""
        return self._times(policy, IDEAL)

    def _times(self, policy: str, baseline: str) -> float:
        return self.pairs(policy, baseline).quartiles(smaller_is_better=True)[1]


def policy_table(cells: Sequence[CellTimes]) -> Table:
    """Return a table of all cells (batch size and length). For each policy it shows the median step time in
    milliseconds, the speedup over the policy `host`, and the time of a step of the policy `device` divided by the time
    of a step of this policy. All cells must have the same policies."""
    title = f"a step: ms, times as fast as {STREAMED}, part of the ideal ({IDEAL}'s step / this step)"
    table = Table("policy", *(f"{cell.batch} x {cell.context}" for cell in cells), title=title)
    for policy in cells[0].times_ms:
        table.add_row(policy, *(_entry(cell, policy) for cell in cells))
    return table


def _entry(cell: CellTimes, policy: str) -> str:
    median = cell.pairs(policy, STREAMED).our_median
    return f"{median:.1f} ms, {cell.speedup(policy):.2f} x, {cell.share_of_ideal(policy):.0%}"
