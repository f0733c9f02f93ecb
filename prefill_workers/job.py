"""Job (a prefill job), JobReport (its report) and KvSender, the port through which a rank sends the job's KV to the
slot.

`prefill_workers.servicer` makes jobs of messages and implements KvSender; `prefill_workers.engine` and
`prefill_workers.chain` run the jobs.
"""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from math import inf, isfinite
from typing import TYPE_CHECKING, Protocol

from baton.errors import InvalidArgumentError
from baton.modeling.kv.buffers import KvBuffer
from baton.process.crash_notes import fingerprint
from baton.results.prefill_trace import Interval
from baton.sampling_params import SamplingParams
from baton.types import Epoch, JobId, Rank, RequestId, SampledToken, TokenRange

if TYPE_CHECKING:
    from baton.text.token_masks import ChoiceMasks


@dataclass(frozen=True)
class Job:
    """One attempt at prefilling one request. All ranks of the job get an equal Job. `ranks[i]` computes `chunks[i]`.
    The chunks are consecutive and together end where `prompt_ids` followed by `output_ids` ends. The KV of tokens
    before the first chunk is cached, in `prefix`. Raises InvalidArgumentError if these conditions do not hold."""

    number: JobId
    epoch: Epoch
    request_id: RequestId
    attempt: int
    ranks: tuple[Rank, ...]
    """Ranks of the group that compute the job, at least one, in ascending order."""
    chunks: tuple[TokenRange, ...]
    prompt_ids: Sequence[int]
    output_ids: Sequence[int] = ()
    """Tokens that earlier attempts at the request emitted."""
    params: SamplingParams = field(default_factory=SamplingParams)
    """Sampling parameters of the request, whose choices share this prompt."""
    prefix: tuple[KvBuffer, ...] = ()
    """Consecutive pieces of cached KV that together cover at least the tokens [0, chunks[0].start). They are read-only:
    all ranks of a node read them from the same memory. Empty when no prefix is cached."""
    due_s: float = 0.0
    """Due time in seconds on the orchestrator's clock. A rank serves the runnable job with the earliest due time; if
    due times are equal, the job with the lowest number."""
    layer_s: float = 0.0
    """Predicted seconds of the slowest layer on any of the job's ranks; 0 if unknown."""
    masks: "Future[list[ChoiceMasks]] | None" = None
    """Future of the token masks of a constrained output's first token, which are the same for all choices. None on all
    ranks except the last, and for outputs without constraints. The job computes while the grammar is compiled, and no
    other job waits for the compilation."""

    def __post_init__(self) -> None:
        ranks, chunks = self.ranks, self.chunks
        self._require(isfinite(self.due_s), "due_s", "use a time in seconds")
        self._require(0 <= self.layer_s < inf, "layer_s", "use a time, or 0 when it is unknown")
        self._require(bool(ranks) and list(ranks) == sorted(set(ranks)), "ranks", "name ranks once each, ascending")
        self._require(len(chunks) == len(ranks), "chunks", f"give one for each of {len(ranks)} ranks")
        self._require(all(len(chunk) for chunk in chunks), "chunks", "give every rank at least one token")
        joined = all(left.end == right.start for left, right in pairwise(chunks))
        num_tokens = len(self.prompt_ids) + len(self.output_ids)
        self._require(joined and chunks[-1].end == num_tokens, "chunks", f"cover the prompt up to {num_tokens}")
        ends = [0, *(piece.tokens.end for piece in self.prefix)]
        consecutive = all(piece.tokens.start == end for piece, end in zip(self.prefix, ends, strict=False))
        covered = consecutive and self.cached.end <= ends[-1]
        self._require(covered, "chunks", f"start within the {ends[-1]} cached tokens that this rank holds")

    @property
    def cached(self) -> TokenRange:
        """Return the range of tokens whose KV is cached, so that no rank computes it."""
        return TokenRange(0, self.chunks[0].start)

    @cached_property
    def cached_pieces(self) -> list[tuple[KvBuffer, TokenRange]]:
        """Return the memory of the cached tokens, as tuples of a piece of `prefix` and the range of its tokens that are
        used."""
        pieces = [piece for piece in self.prefix if piece.tokens.start < self.cached.end]
        return [(piece, TokenRange(piece.tokens.start, min(piece.tokens.end, self.cached.end))) for piece in pieces]

    @cached_property
    def fingerprint(self) -> bytes:
        """Return the fingerprint by which a crash note names the job's request."""
        return fingerprint(self.request_id, self.prompt_ids)

    @property
    def token_ids(self) -> list[int]:
        """Return all tokens to prefill: the prompt, and the output of earlier attempts."""
        return [*self.prompt_ids, *self.output_ids]

    def _require(self, holds: bool, name: str, remedy: str) -> None:
        if not holds:
            raise InvalidArgumentError(f"job {self.number}: {name} = {getattr(self, name)!r} is wrong: {remedy}")


class KvSender(Protocol):
    """Port through which a rank sends its own KV to the slot while the chain still runs. Called on the engine's thread;
    no method may block.

    `num_present` is the number of tokens at the start of the prompt whose KV the slot has already, so that no rank has
    to push it. `push` and `received` are called any number of times, then `finish` or `abort` once. If the job fails
    between its last computation and its last message, `abort` is called after `finish`. No method is called after
    `abort`. An exception from any method except `abort` fails the job with this exception.
    """

    @property
    def num_present(self) -> int: ...

    def push(self, layer: int, tokens: TokenRange, data: memoryview) -> None:
        """Accept `data`, the KV rows of `tokens` in `layer`. The rows never change again."""
        ...

    def received(self, layer: int, tokens: TokenRange, data: memoryview) -> None:
        """Accept `data`, the KV rows of `tokens` in `layer` that earlier ranks computed; these ranks also push them to
        the slot. Called only on a chain's last rank. `data` is valid only until this call returns."""
        ...

    def finish(self, firsts: tuple[SampledToken, ...]) -> None:
        """Complete the job after all layers were pushed. `firsts`: next token of each choice; empty on all ranks except
        the last."""
        ...

    def abort(self, error: BaseException) -> None:
        """Discard all pushed rows because the job has failed. Must not raise."""
        ...


@dataclass(frozen=True)
class JobReport:
    """Times and counts of one rank's work on one job."""

    rank: Rank
    tokens: TokenRange
    """Tokens of the prompt that the rank computed."""
    start_ns: int
    """Start of the job's first turn, in unix nanoseconds."""
    end_ns: int
    """End of the job's last turn, in unix nanoseconds."""
    layers: tuple[Interval, ...]
    """Time interval of each layer, including waits and other jobs' turns."""
    wait_s: float
    """Seconds in which the job waited for earlier ranks' KV, summed over all layers."""
    num_bytes_sent: int
    """Bytes of KV sent to the chain's next rank."""
    num_messages_sent: int
    """Number of messages in which `num_bytes_sent` were sent."""
    send_s: float
    """Transfer time of the KV messages to the next rank, in seconds. Each message counts from the time when the link
    was free for it to its arrival."""
