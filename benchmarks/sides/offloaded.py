"""Sequences whose KV is managed by one residency policy, on an emulated device that no other policy uses. Used by
`benchmarks.offload`. Each step feeds the next tokens of a text."""

import contextlib
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from baton.modeling.device.copying import LinkRate
from baton.modeling.forward.decoder import Decoder
from baton.modeling.sparse.selection_file import PreparedSelection
from baton_lab.comparators.residencies import make_residency
from benchmarks.sides.timed_steps import MeasuredDevice, TimedDecoder, TimedDevice, TimedResidency
from benchmarks.support.step_parts import Part, PartClock
from deploy.tuning.selection.passages import Context, PassageRows, shape_for
from generate_workers.residency.policies import SelectionSource

COUNTED_STEPS = 2
STEPS_A_ROUND = COUNTED_STEPS + 1
"""Number of steps per round: one warm-up step, and COUNTED_STEPS measured ones."""


@dataclass(frozen=True, kw_only=True)
class LoadedSelection(SelectionSource):
    """Key selection that was loaded or fitted earlier. Several policies share it, because fitting is slow."""

    prepared: PreparedSelection

    def load(self) -> PreparedSelection:
        """Return `prepared`, the key selection that was loaded or fitted earlier."""
        return self.prepared

    def load_early(self) -> PreparedSelection:
        """Return `prepared`, which is also used if the policy selects keys one layer early."""
        return self.prepared


class Side:
    """One system in the comparison of residency policies: sequences whose KV is managed by one policy, on an emulated
    device that no other policy uses."""

    def __init__(self, rows: PassageRows, device: MeasuredDevice, clock: PartClock | None = None) -> None:
        """Wrap sequences that run on `device`. `clock` measures the parts of their steps; None: parts are not
        measured."""
        self._rows, self.device, self._clock = rows, device, clock
        self.step_bytes = self.counted_bytes = 0.0
        """Mean number of bytes that crossed the link per step. `step_bytes` is computed from the link's counters, and
        `counted_bytes` from the numbers that the steps report."""
        self.hidden = 1.0
        """Fraction of the fetch time during which no step waited for the fetch, because it overlapped with
        computation."""
        self.parts_ms: Mapping[Part, float] = {}
        """Mean milliseconds of each part of a step. Empty if no `clock` was given, because parts are then not measured.
        The sum of the parts may be less than the duration of the step."""

    def step_ms(self) -> float:
        """Return the mean milliseconds of COUNTED_STEPS steps, after one warm-up step."""
        self._rows.step()
        link = self.device.link
        bytes_before = link.num_bytes_fetched + link.num_bytes_stored
        fetch_s, waited_s = link.fetch_s, link.waited_s
        spent_s = {} if self._clock is None else self._clock.spent_s
        scores = [self._rows.step() for _ in range(COUNTED_STEPS)]
        if self._clock is not None:
            self.parts_ms = {
                part: (after_s - spent_s[part]) / COUNTED_STEPS * 1e3 for part, after_s in self._clock.spent_s.items()
            }
        self.step_bytes = (link.num_bytes_fetched + link.num_bytes_stored - bytes_before) / COUNTED_STEPS
        self.counted_bytes = statistics.fmean(score.num_link_bytes for score in scores)
        if link.fetch_s > fetch_s:
            self.hidden = 1.0 - (link.waited_s - waited_s) / (link.fetch_s - fetch_s)
        return statistics.fmean(score.duration_s for score in scores) * 1e3


@contextlib.contextmanager
def running(
    policy: str,
    contexts: Sequence[Context],
    source: SelectionSource,
    rate: LinkRate,
    room: int | None,
    *,
    clock: PartClock | None = None,
) -> Iterator[Side]:
    """Context manager. Open sequences of a residency policy on an emulated device, and yield a Side that steps them.
    The sequences are closed on exit. `room` is the device memory for KV in bytes; None: no limit. `clock` measures the
    parts of the steps; None: parts are not measured."""
    device = MeasuredDevice(rate) if clock is None else TimedDevice(rate, clock)
    decoder = _decoder(source.decoder, device, clock)
    shape = shape_for(decoder, [context.passage for context in contexts])
    there = replace(source, decoder=decoder, device_bytes=room)
    with contextlib.closing(make_residency(policy, shape, device, there)) as residency:
        device.bound(room)
        watched = residency if clock is None else TimedResidency(residency, clock)
        with PassageRows.opened(decoder, watched, contexts) as rows:
            yield Side(rows, device, clock)
    device.link.rest()


def _decoder(cpu: Decoder, device: MeasuredDevice, clock: PartClock | None) -> Decoder:
    if clock is None:
        return Decoder(cpu.config, cpu.weights, device=device)
    return TimedDecoder(cpu, device, clock)
