"""Measures a prefill chain of a running cluster. Prompts of several lengths are sent through the public client.

The computation time of a rank is the time from the start of its first layer to the end of its last layer, minus the
time that it waits for KV of earlier ranks. It is measured while all ranks of the chain compute, send KV to each other
and send KV to the engine, as in normal service. Functions block and run one prompt at a time.
"""

import itertools
import random
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baton import Client
from baton.calls.requests import BY_CHAIN
from baton.errors import InvalidArgumentError, UnavailableError
from baton.planning.calibration import Calibration, calibrate_chain
from baton.planning.chain.wavefront import chain_ttft
from baton.planning.cost_model import BATON
from baton.planning.fit import RankRow
from baton.results.completion import Completion
from baton.results.prefill_trace import RankTiming
from baton.sampling_params import SamplingParams

LEAST_TOKENS = 8
"""Number of tokens of the shortest prompt that is measured."""
_NUM_LENGTHS = 6
_LONGEST_SHARE = 0.75
"""Default length of the longest measured prompt, as a fraction of the maximum number of tokens of a request."""
_ONE_TOKEN = SamplingParams(max_tokens=1, ignore_eos=True)


@dataclass(frozen=True)
class Sample:
    """Measured timings of one prompt."""

    num_tokens: int
    ttft_s: float
    ranks: tuple[RankTiming, ...]
    """Timings of the ranks that computed the prompt, in rank order."""
    num_ranks: int
    """Number of ranks of the prefill group. The prompt may have been computed by only some of these ranks."""

    @property
    def chunks(self) -> tuple[int, ...]:
        """Number of prompt tokens that each rank computed, in rank order."""
        return tuple(len(rank.tokens) for rank in self.ranks)

    @property
    def chain_s(self) -> float:
        """Seconds from the start of the first layer on the first rank to the end of the last layer on the last rank."""
        return (self.ranks[-1].end_ns - self.ranks[0].start_ns) / 1e9


@dataclass(frozen=True)
class Check:
    """Comparison of predicted and measured times to first token, for prompts of one length that were divided among the
    ranks in the same way."""

    num_tokens: int
    chunks: tuple[int, ...]
    is_fitted: bool
    """True if the fit used the prompts of this length that were divided among this number of ranks."""
    measured_s: float
    """Median time to first token, in seconds."""
    predicted_s: float
    former_s: float
    """Time to first token, in seconds, as predicted by the calibration that was in use before the fit."""

    @property
    def error(self) -> float:
        """Predicted minus measured time, as a fraction of the measured time."""
        return self.predicted_s / self.measured_s - 1


@dataclass(frozen=True)
class ChainFit:
    """Result of a fit: the fitted calibration, and the errors of its predictions."""

    calibration: Calibration
    residual: float
    """Largest difference between a rank's measured computation time and the time that the fit gives, as a fraction of
    the measured time."""
    checks: tuple[Check, ...]
    """Comparisons of predicted and measured times, in ascending order of prompt length. There is one comparison for
    each prompt length and each division of the prompt among the ranks (`Check.chunks`: number of tokens of each
    rank)."""
    width: int
    """Number of ranks that computed each prompt that was used for the fit. It may be smaller than `num_ranks`."""
    num_ranks: int
    """Number of ranks of the prefill group."""

    @property
    def median_error(self) -> float:
        """Median absolute error of the predictions, as a fraction of the measured time, over the prompts that were not
        used for the fit. If all prompts were used for the fit, it is the median over all of them."""
        unseen = [abs(check.error) for check in self.checks if not check.is_fitted]
        return statistics.median(unseen or [abs(check.error) for check in self.checks])


def fitted_lengths(max_tokens: int) -> tuple[int, ...]:
    """Return the prompt lengths that are used for the fit, in ascending order. `max_tokens` is the maximum number of
    tokens of a request. Each length is twice the previous one. Raises InvalidArgumentError if the shortest length would
    be below LEAST_TOKENS, because the costs could then not be separated."""
    longest = int(max_tokens * _LONGEST_SHARE)
    lengths = tuple(longest >> power for power in reversed(range(_NUM_LENGTHS)))
    if lengths[0] < LEAST_TOKENS:
        raise InvalidArgumentError(
            f"requests have {max_tokens} tokens at most, too few for {_NUM_LENGTHS} prompt lengths from {LEAST_TOKENS} "
            "on, each twice the last: raise generate.max_slot_tokens, or give --lengths"
        )
    return lengths


def lengths_between(lengths: Sequence[int]) -> tuple[int, ...]:
    """Return one further prompt length between every two neighbouring `lengths`. Prompts of these lengths are measured
    to check the fit, but are not used for the fit."""
    ascending = sorted(set(lengths))
    between = [round((low * high) ** 0.5) for low, high in itertools.pairwise(ascending)]
    return tuple(each for each in between if each not in ascending)


def measure(
    client: Client, lengths: Sequence[int], *, repeats: int, rng: random.Random, done: Callable[[int], None]
) -> list[Sample]:
    """Run `repeats` rounds of prompts and return their measurements. A round has one prompt of each length in
    `lengths`, in random order. One further round at the beginning is not measured. The tokens of each prompt are
    random, so that its KV is not cached. `done` is called with the number of tokens of each prompt that has ended.
    Raises UnavailableError if a chain did not prefill a prompt at the first attempt."""
    vocab_size = client.model().vocab_size
    samples = []
    for round_number in range(repeats + 1):
        for num_tokens in rng.sample(list(lengths), len(lengths)):
            token_ids = [rng.randrange(vocab_size) for _ in range(num_tokens)]
            stream = client.generate(token_ids=token_ids, params=_ONE_TOKEN, metadata=dict([BY_CHAIN]))
            sample = _sample(stream.collect())
            if round_number:
                samples.append(sample)
            done(num_tokens)
    return samples


def evaluate(origin: Calibration, samples: Sequence[Sample], fitted: Sequence[int]) -> ChainFit:
    """Fit a calibration to samples, and predict all samples with it. `origin` is the calibration that the fit adjusts.
    `fitted` has the prompt lengths whose samples are used for the fit.

    A prompt may be computed by only some of the ranks of a prefill group. The fit uses only the prompts that were
    computed by the largest number of ranks (normally all ranks of the group), because a rank may be faster while other
    ranks are idle. Raises InvalidArgumentError if these prompts have fewer than two lengths, or if their times do not
    grow with the length.
    """
    width, num_ranks = max(len(sample.ranks) for sample in samples), max(sample.num_ranks for sample in samples)
    basis = [sample for sample in samples if sample.num_tokens in fitted and len(sample.ranks) == width]
    if len({sample.num_tokens for sample in basis}) < 2:
        raise InvalidArgumentError(f"fewer than two lengths were divided among {width} ranks: give longer --lengths")
    request_s = max(statistics.median(sample.ttft_s - sample.chain_s for sample in basis), 0.0)
    calibration, residual = calibrate_chain(origin, rank_rows(basis), link_points(basis), request_s)
    by_length: defaultdict[tuple[int, tuple[int, ...]], list[float]] = defaultdict(list)
    for sample in samples:
        by_length[sample.num_tokens, sample.chunks].append(sample.ttft_s)
    checks = [
        Check(
            num_tokens=num_tokens,
            chunks=chunks,
            is_fitted=num_tokens in fitted and len(chunks) == width,
            measured_s=statistics.median(times),
            predicted_s=float(chain_ttft(chunks, calibration.cost, BATON)),
            former_s=float(chain_ttft(chunks, origin.cost, BATON)),
        )
        for (num_tokens, chunks), times in sorted(by_length.items())
    ]
    return ChainFit(calibration, residual, tuple(checks), width, num_ranks)


def rank_rows(samples: Sequence[Sample]) -> list[RankRow]:
    """Return one entry for each distinct chunk of a prompt that a rank computed. An entry has the chunk's number of
    tokens, its start, whether the chain's last rank computed it, and the median of its measured computation times in
    seconds."""
    seconds: defaultdict[tuple[int, int, bool], list[float]] = defaultdict(list)
    for sample in samples:
        for rank in sample.ranks:
            seconds[len(rank.tokens), rank.tokens.start, rank is sample.ranks[-1]].append(rank.computed_s)
    return [RankRow(*chunk, statistics.median(times)) for chunk, times in sorted(seconds.items())]


def link_points(samples: Sequence[Sample]) -> tuple[tuple[float, float], ...]:
    """Return pairs (size of a message in bytes, seconds to send it) for the messages between neighbouring ranks. The
    seconds are the median over all messages of this size. Return no pairs if the chains have only one rank."""
    seconds: defaultdict[float, list[float]] = defaultdict(list)
    for sample in samples:
        for rank in sample.ranks[:-1]:
            message_bytes = rank.num_bytes_sent / rank.num_messages_sent
            seconds[message_bytes].append(rank.send_s / rank.num_messages_sent)
    return tuple((num_bytes, statistics.median(times)) for num_bytes, times in sorted(seconds.items()))


def _sample(output: Completion) -> Sample:
    assert output.usage is not None and output.timings is not None, "a stream ended without its last message"
    prefill, ttft_s = output.timings.prefill, output.timings.time_to_first_token_s
    ranks, width = prefill.ranks, prefill.width
    if not ranks or ttft_s is None or width is None or output.usage.num_attempts > 1:
        raise UnavailableError(
            "the prefill group lost a prompt, or a generation group prefilled it: calibrate when `baton status` shows "
            "all groups ready"
        )
    in_order = tuple(sorted(ranks, key=lambda rank: rank.tokens.start))
    return Sample(output.usage.num_prompt_tokens, ttft_s, in_order, width.num_ranks)
