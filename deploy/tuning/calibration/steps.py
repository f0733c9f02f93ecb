"""Measures generation steps on a running cluster. Runs batches of sequences of equal length, and reads the times of
their tokens.

A batch is one request with one choice for each sequence. Its prompt is prefilled once, and the KV is copied to a slot
for each sequence. All sequences therefore join the engine's batch in the same step and leave it in the same step. The
engine runs nothing else in between.

The engine sets a token's timestamp. The time between two tokens of a sequence is therefore the duration of a step,
without the delay to the client. The sequences have no drafts. The module `rounds` measures drafts. Functions block and
run one batch at a time.
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
"""Number of steps that are measured for each batch of sequences."""
_BEFORE = NUM_STEPS // 2 + 2
"""Number of output tokens that a sequence has when half of its measured steps have run. It includes two tokens that are
not measured: those of the step that ends the prompt, and of the step after it."""
LEAST_CONTEXT = _BEFORE + 1
"""Minimum context that can be measured, in tokens. A context is the number of tokens (prompt and output) that a
sequence has when half of its measured steps have run. A prompt of one token has the minimum context."""
_BATCHES = (1, 4, 16, 64)
_CONTEXTS = (192, 1024, 4096)


@dataclass(frozen=True)
class Grid:
    """Batches to measure: all combinations of a batch size and a context."""

    batches: tuple[int, ...]
    """Batch sizes (numbers of sequences), in ascending order."""
    contexts: tuple[int, ...]
    """Contexts in tokens, in ascending order. A context is the number of tokens (prompt and output) that a sequence has
    when half of its measured steps have run."""
    repeats: int = 1
    """Number of times that each batch is measured."""

    @property
    def cells(self) -> list[tuple[int, int]]:
        """All pairs (number of sequences, tokens of context) that are measured."""
        return [(batch, context) for batch in self.batches for context in self.contexts]

    def work(self, cell: tuple[int, int]) -> int:
        """Return an estimate of the time to measure a batch, in an arbitrary unit. `cell` is a pair (number of
        sequences, tokens of context). The estimate is the sum of the work to prefill one prompt and the work of the
        steps of all sequences."""
        return cell[1] + NUM_STEPS * cell[0]


def default_batches(num_slots: int) -> tuple[int, ...]:
    """Return the batch sizes (numbers of sequences) to measure on a group of `num_slots` slots. The largest is
    `num_slots`, but at most the maximum number of choices of a request."""
    most = min(num_slots, MAX_CHOICES)
    return tuple(sorted({*(each for each in _BATCHES if each <= most), most}))


def longest_context(max_tokens: int) -> int:
    """Return the longest context that can be measured, in tokens, if a request has at most `max_tokens` tokens. A
    context is the number of tokens (prompt and output) that a sequence has when half of its measured steps have run."""
    return max_tokens - NUM_STEPS // 2


def default_contexts(max_tokens: int) -> tuple[int, ...]:
    """Return the contexts to measure, in tokens, if a request has at most `max_tokens` tokens. Raises
    InvalidArgumentError if `max_tokens` is too small for two contexts."""
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
    """Measure step times for every batch size and context of `grid`. Return them in seconds as a table, with one line
    for each batch size and one column for each context. Each value is the median over the steps of all repeats.

    Each repeat measures the batches in random order. One batch before the first repeat is discarded. `done` is called
    after each batch with an estimate of the time that it took, in the arbitrary unit of `Grid.work`. Raises
    UnavailableError if a batch was lost, or did not run alone.
    """
    vocab_size = client.model().vocab_size
    seconds: dict[tuple[int, int], list[float]] = {cell: [] for cell in grid.cells}
    _run(client, (grid.batches[-1], grid.contexts[0]), rng, vocab_size)
    for _ in range(grid.repeats):
        for cell in rng.sample(grid.cells, len(grid.cells)):
            seconds[cell] += _run(client, cell, rng, vocab_size)
            done(grid.work(cell))
    return [[statistics.median(seconds[batch, context]) for context in grid.contexts] for batch in grid.batches]


def steps_of(events: Iterable[TokenEvent], batch: int) -> list[float]:
    """Return the duration in seconds of each step of a batch except the first, which is not measured. `events` are the
    token events of a batch of `batch` sequences that ran alone from its first to its last token. Raises
    UnavailableError if the sequences did not run in the same steps."""
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
    """Run a batch (one request with several choices), and return its token events. Raises UnavailableError if the
    cluster lost the request."""
    with client.generate(token_ids=prompt, params=params) as stream:
        events = list(stream)
        usage, num_resumes = stream.usage, stream.output.num_resumes
    assert usage is not None, "a stream ended without its last message"
    if usage.num_attempts > 1 or num_resumes:
        raise UnavailableError("the cluster lost a batch: calibrate when `baton status` shows all groups ready")
    return events
