"""Simulated generation group: a batch of sequences. The time of many steps is computed by one formula, so steps are not
simulated one by one.

A step of N sequences with C tokens in total takes A + B C seconds, and increases C by N. A and B follow from the cost
of steps (`baton.planning.work_cost`). While no sequence joins or leaves, k steps therefore take

    k (A + B C) + B N k (k - 1) / 2

A sequence joins at the first step that begins after its arrival, as in the engine, and leaves after its last step. Does
no I/O.
"""

import heapq
import math
from collections.abc import Callable
from itertools import count

from baton.planning.work_cost import WorkCost
from baton_lab.traffic.gaps import GapHistogram


class Batch:
    """Simulated batch of one generation group. Its owner must call `advance` at the simulated time `next_end_s`."""

    def __init__(self, cost: WorkCost, gaps: GapHistogram, on_end: Callable[[int, float], None]) -> None:
        """Create an empty batch. `cost`: cost of steps. `gaps`: histogram to which the times between tokens are added.
        `on_end` is called when a sequence leaves the batch, with its number and the time of its last token. This time
        may be up to one step in the future."""
        self._cost = cost
        self._gaps = gaps
        self._on_end = on_end
        self._ends: list[tuple[int, int, int, int]] = []
        """Heap of the sequences, ordered by their last step in the batch. An entry is (total number of steps of the
        batch when the sequence leaves, order of joining, final number of tokens, number of the sequence)."""
        self._order = count()
        self._num_steps = 0
        self._at_s = 0.0
        """Simulated time of the step boundary up to which steps have been simulated. May be up to one step in the
        future."""
        self.num_keys = 0
        """Number of tokens of all sequences together, at the step boundary `_at_s`."""

    @property
    def num_rows(self) -> int:
        """Return the number of sequences in the batch."""
        return len(self._ends)

    @property
    def step_s(self) -> float:
        """Return the duration of the next step in seconds; 0 if the batch is empty."""
        return self._base_s + self._cost.key_s * self.num_keys if self._ends else 0.0

    @property
    def _base_s(self) -> float:
        return self._cost.step_s + len(self._ends) * self._cost.token_s

    def join(self, number: int, context: int, num_tokens: int, now_s: float) -> None:
        """Add the sequence `number`, which has `context` tokens now. It joins the batch at the next step boundary, and
        leaves the batch `num_tokens` steps later. `num_tokens` is at least 1."""
        if not self._ends:
            self._at_s = max(now_s, self._at_s)
        elif now_s > self._at_s:
            self._settle(self._steps_begun(now_s))
            self._leave()
            self._at_s = max(self._at_s, now_s)
        heapq.heappush(self._ends, (self._num_steps + num_tokens, next(self._order), context + num_tokens, number))
        self.num_keys += context

    def boundary_s(self, now_s: float) -> float:
        """Return the time of the first boundary between two steps at or after `now_s`. If the batch is empty, a step
        can begin at `now_s` or at the end of the last step, whichever is later."""
        if not self._ends or now_s <= self._at_s:
            return max(now_s, self._at_s)
        return self._at_s + self._seconds(self._steps_begun(now_s))

    def advance(self) -> None:
        """Run steps until at least one sequence is complete. Remove all complete sequences from the batch."""
        if self._ends:
            self._settle(self._ends[0][0] - self._num_steps)
            self._leave()

    @property
    def next_end_s(self) -> float:
        """Return the time at which the next sequence leaves the batch; infinity if the batch is empty."""
        if not self._ends:
            return math.inf
        return self._at_s + self._seconds(self._ends[0][0] - self._num_steps)

    def drain_s(self, now_s: float) -> float:
        """Return the predicted seconds from `now_s` until the batch is empty; 0 if it is empty now. Assumes that no
        sequence joins, and that all steps take as long as the next one."""
        if not self._ends:
            return 0.0
        num_steps = max(end for end, _, _, _ in self._ends) - self._num_steps
        return max(self._at_s - now_s, 0.0) + num_steps * self.step_s

    def _seconds(self, num_steps: int) -> float:
        base, slope = self._base_s, self._cost.key_s
        rising = slope * len(self._ends) * (num_steps * (num_steps - 1) / 2)
        return num_steps * (base + slope * self.num_keys) + rising

    def _steps_begun(self, now_s: float) -> int:
        """Return the number of steps that begin before `now_s`, at most until the next sequence leaves."""
        base, slope = self._base_s, self._cost.key_s
        half = slope * len(self._ends) / 2
        linear = base + slope * self.num_keys - half
        left_s = now_s - self._at_s
        most = self._ends[0][0] - self._num_steps
        if half <= 0:
            guess = left_s / linear if linear > 0 else most
        else:
            guess = 2 * left_s / (linear + math.sqrt(linear * linear + 4 * half * left_s))
        return min(math.ceil(guess - 1e-9), most)

    def _settle(self, num_steps: int) -> None:
        """Advance the state by `num_steps` steps, during which no sequence leaves except at the end."""
        if num_steps <= 0:
            return
        seconds = self._seconds(num_steps)
        self._gaps.add(seconds / num_steps, num_steps * len(self._ends))
        self._num_steps += num_steps
        self._at_s += seconds
        self.num_keys += num_steps * len(self._ends)

    def _leave(self) -> None:
        while self._ends and self._ends[0][0] <= self._num_steps:
            _, _, num_tokens, number = heapq.heappop(self._ends)
            self.num_keys -= num_tokens
            self._on_end(number, self._at_s)
