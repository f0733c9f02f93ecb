"""Measures generation steps on a running cluster: runs batches of sequences of equal length, and reads the times of
their tokens.

A batch is one request with one choice for each sequence. Its prompt is prefilled once, and the KV is copied to a slot
for each sequence. So all sequences join the batch in the same step and leave it in the same step, and the engine runs
nothing else between these steps. The engine sets a token's timestamp, so the time between two tokens of a sequence is
the duration of a step, regardless of the delay to the client. The sequences have no drafts; the module `rounds`
measures drafts. Blocks; one batch at a time.
"""

import itertools
import random
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from baton import Client
from baton.errors import InvalidArgumentError, UnavailableError
from baton.limits import MAX_CHOICES
from baton.sampling_params import SamplingParams
from baton.types import TokenEvent

NUM_STEPS = 16
"""Number of steps that are measured of each batch."""
_BEFORE = NUM_STEPS // 2 + 2
"""Number of tokens that a sequence gets in the first half of its measurement. Two of them are not measured: the token
at the prompt's end, and the token of the next step."""
LEAST_CONTEXT = _BEFORE + 1
"""Number of tokens that a sequence with the shortest prompt has half-way through its measurement."""
_BATCHES = (1, 4, 16, 64)
_CONTEXTS = (192, 1024, 4096)


@dataclass(frozen=True)
class Grid:
    """The batches to measure: every combination of a number of sequences and a context."""

    batches: tuple[int, ...]
    """Numbers of sequences, ascending."""
    contexts: tuple[int, ...]
    """Numbers of tokens that a sequence has half-way through the measurement, ascending."""
    repeats: int = 1
    """Number of times that each batch is measured."""

    @property
    def cells(self) -> list[tuple[int, int]]:
        """All pairs (sequences, tokens) that are measured."""
        return [(batch, context) for batch in self.batches for context in self.contexts]

    def work(self, cell: tuple[int, int]) -> int:
        """Return an estimate of a cell's duration in an arbitrary unit: the prefill of a prompt, then steps of its
        sequences."""
        return cell[1] + NUM_STEPS * cell[0]


def default_batches(num_slots: int) -> tuple[int, ...]:
    """Return the numbers of sequences to measure on a group of `num_slots` slots. The largest is the number of slots,
    or the maximum number of choices of a request if that is smaller."""
    most = min(num_slots, MAX_CHOICES)
    return tuple(sorted({*(each for each in _BATCHES if each <= most), most}))


def longest_context(max_tokens: int) -> int:
    """Return the number of tokens that a sequence has half-way through the measurement in the longest request, of
    `max_tokens` tokens."""
    return max_tokens - NUM_STEPS // 2


def default_contexts(max_tokens: int) -> tuple[int, ...]:
    """Return the contexts to measure for requests of up to `max_tokens`. Raises InvalidArgumentError if no two fit."""
    longest = longest_context(max_tokens)
    contexts = tuple(each for each in _CONTEXTS if each <= longest)
    if len(contexts) < 2:
        contexts = (longest // 4, longest)
    if contexts[0] < LEAST_CONTEXT:
        raise InvalidArgumentError(
            f"requests have {max_tokens} tokens at most, too few for steps at two contexts: raise "
            "generate.max_slot_tokens, or give --contexts"
        )
    return contexts


def measure_steps(client: Client, grid: Grid, *, rng: random.Random, done: Callable[[int], None]) -> list[list[float]]:
    """Measure step times. Return a table in seconds, with one line per number of sequences and one column per context.
    Each value is the median over the steps of all repeats. Each repeat measures the batches in random order. One batch
    before the first repeat is discarded. `done` is called with the work of each batch that has ended. Raises
    UnavailableError if a batch was lost, or did not run alone."""
    vocab_size = client.model().vocab_size
    seconds: dict[tuple[int, int], list[float]] = {cell: [] for cell in grid.cells}
    _run(client, (grid.batches[-1], grid.contexts[0]), rng, vocab_size)
    for _ in range(grid.repeats):
        for cell in rng.sample(grid.cells, len(grid.cells)):
            seconds[cell] += _run(client, cell, rng, vocab_size)
            done(grid.work(cell))
    return [[statistics.median(seconds[batch, context]) for context in grid.contexts] for batch in grid.batches]


def steps_of(events: Iterable[TokenEvent], batch: int) -> list[float]:
    """Return the seconds of each step except the first. `events` are those of a batch that ran alone from its first
    token to its last. Raises UnavailableError if its sequences did not run in the same steps."""
    stamps: list[list[int]] = [[] for _ in range(batch)]
    for event in events:
        if event.token is not None:
            stamps[event.choice].append(event.unix_ns)
    first_ns = [min(row) for row in zip(*stamps, strict=False)]
    last_ns = [max(row) for row in zip(*stamps, strict=False)]
    in_step = all(last < following for last, following in zip(last_ns[:-1], first_ns[1:], strict=True))
    if len(first_ns) != NUM_STEPS + 2 or not in_step:
        raise UnavailableError(
            f"a batch of {batch} rows did not run in step, so its steps cannot be separated: calibrate when the "
            "cluster is idle, or give smaller --batches or --contexts if its memory is short"
        )
    return [(end - start) / 1e9 for start, end in itertools.pairwise(first_ns[1:])]


def _run(client: Client, cell: tuple[int, int], rng: random.Random, vocab_size: int) -> list[float]:
    batch, context = cell
    prompt = [rng.randrange(vocab_size) for _ in range(context - _BEFORE)]
    params = SamplingParams(n=batch, max_tokens=NUM_STEPS + 2, ignore_eos=True, num_drafts=0)
    return steps_of(events_of(client, prompt, params), batch)


def events_of(client: Client, prompt: list[int], params: SamplingParams) -> list[TokenEvent]:
    """Run a batch (one request with several choices) and return its events. Raises UnavailableError if the cluster lost
    the request."""
    with client.generate(token_ids=prompt, params=params) as stream:
        events = list(stream)
        usage, num_resumes = stream.usage, stream.output.num_resumes
    assert usage is not None, "a stream ended without its last message"
    if usage.num_attempts > 1 or num_resumes:
        raise UnavailableError("the cluster lost a batch: calibrate when `baton status` shows all groups ready")
    return events
