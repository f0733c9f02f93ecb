"""Fits the cost model of the ranks that a benchmark compares, from measurements while all ranks are busy.

A rank that runs alone may be faster than a rank whose neighbour also computes (`benchmarks.prediction` measures the
difference). Therefore whole chains are run. The compute time of each rank, without waits, gives one data point: (chunk
length, keys before the chunk, seconds). Messages between ranks are timed over the same links that the chain uses, at
the same simulated speed.
"""

import dataclasses
import statistics
from collections.abc import Sequence

from baton.planning.chain.partition import as_ranges
from baton.planning.chain.search import rounded
from baton.planning.cost_model import CostModel, LinkModel
from baton.planning.hardware import ModelCosts
from baton_lab.study.prefill_fit import RankRow, fit_chain, fit_link
from benchmarks.baselines.link_probe import Points
from benchmarks.baselines.pacing import FULL_SPEED, Pace
from benchmarks.baselines.rank_process import Task
from benchmarks.baselines.ranks import Outcome, Ranks
from benchmarks.support.harness import progress, random_prompt

LENGTHS = (256, 1024, 3000)
QUICK_LENGTHS = (128, 512)
_SLOPES = (1.0, 0.6)
"""Ratios of each rank's chunk length to that of the previous rank, used for the measured chains. With 1.0 all chunks
have the same length. With 0.6 the work of the ranks is nearly balanced."""
_REPEATS = 3
_MESSAGE_BYTES = (2**14, 2**17, 2**20)
_MESSAGE_REPEATS = 3


def calibrated(ranks: Ranks, origin: ModelCosts, kernel: str, lengths: Sequence[int] = LENGTHS) -> ModelCosts:
    """Run chains on all ranks and send messages between the ranks. Return the costs, with those of
    prefill fitted to the medians of three runs.

    `origin`: nominal costs, of which those are kept that are not measured. `lengths`: prompt lengths in tokens. Takes
    about half a minute for the default lengths.
    """
    rows: list[RankRow] = []
    request_s: list[float] = []
    with progress(f"calibrating {kernel}", len(lengths) * len(_SLOPES)) as advance:
        for num_tokens in lengths:
            for slope in _SLOPES:
                chunks = rounded([slope**rank for rank in range(len(ranks))], num_tokens)
                ranges = as_ranges(chunks, 0)
                prompts = [random_prompt(num_tokens, seed) for seed in range(_REPEATS + 1)]
                outcomes = [ranks.run(Task("kvr", prompt, ranges, kernel=kernel)) for prompt in prompts]
                for rank, chunk in enumerate(ranges):
                    seconds = statistics.median(each.answers[rank].compute_s for each in outcomes[1:])
                    rows.append(RankRow(len(chunk), chunk.start, rank == len(ranks) - 1, seconds))
                request_s += [_besides(outcome) for outcome in outcomes[1:]]
                advance()
    fitted = fit_chain(origin.prefill, rows, message_points(ranks), statistics.median(request_s))
    return dataclasses.replace(origin, prefill=fitted)


def message_points(ranks: Ranks, pace: Pace = FULL_SPEED) -> Points:
    """Measure single messages between two ranks. Return (bytes, seconds) for each message; empty if there is only one
    rank."""
    return ranks.link_points(_MESSAGE_BYTES, _MESSAGE_REPEATS, pace) if len(ranks) > 1 else ()


def at_pace(cost: CostModel, ranks: Ranks, pace: Pace) -> CostModel:
    """Return a copy of `cost` whose link model is measured over links with the speed `pace`."""
    return dataclasses.replace(cost, link=measured_link(ranks, pace))


def measured_link(ranks: Ranks, pace: Pace) -> LinkModel:
    """Measure messages between two ranks over links with the speed `pace`, and return a link model fitted to them."""
    return fit_link(message_points(ranks, pace))


def _besides(outcome: Outcome) -> float:
    """Return the seconds of a prefill outside its layers: before the first layer starts and after the last one ends on
    any rank. They include commands, logits and the answer."""
    reports = [answer.report for answer in outcome.answers if answer.report is not None]
    span_ns = max(report.end_ns for report in reports) - min(report.start_ns for report in reports)
    return max(outcome.seconds - span_ns / 1e9, 0.0)
