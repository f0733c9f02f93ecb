"""Defines prefill jobs (Job), their reports (JobReport), and the interface through which a rank sends the job's KV to
the slot (KvSender).

`prefill_workers.servicer` creates jobs from messages and implements KvSender; `prefill_workers.engine` and
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

    The chunks are consecutive. The last chunk ends at the end of the sequence, which is `prompt_ids` followed by
    `output_ids`. The KV of tokens before the first chunk is cached, in `prefix`. Raises InvalidArgumentError if these
    conditions do not hold.
    """

    number: JobId
    epoch: Epoch
    request_id: RequestId
    attempt: int
    ranks: tuple[Rank, ...]
    """Ranks of the group that compute the job, at least one, in ascending order."""
    chunks: tuple[TokenRange, ...]
    prompt_ids: Sequence[int]
    output_ids: Sequence[int] = ()
    """Output tokens that earlier attempts at the request have produced."""
    params: SamplingParams = field(default_factory=SamplingParams)
    """Sampling parameters of the request. All choices of the request share the prompt of this job."""
    prefix: tuple[KvBuffer, ...] = ()
    """Buffers of cached KV, for consecutive ranges of tokens that together cover at least the tokens before
    `chunks[0].start`. They are read-only, because all ranks of a node read the same memory. Empty if no prefix is
    cached."""
    due_s: float = 0.0
    """Due time in seconds on the orchestrator's clock. A rank serves the runnable job with the earliest due time. If
    due times are equal, it serves the job with the lowest number."""
    layer_s: float = 0.0
    """Predicted seconds of the slowest layer on any of the job's ranks; 0 if unknown."""
    masks: "Future[list[ChoiceMasks]] | None" = None
    """Future of the token masks for the first token of a constrained output. The masks are the same for all choices.
    None on all ranks except the last, and for outputs without constraints. The job computes while the grammar is
    compiled. Other jobs do not wait for the compilation."""

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
        """Return the range of leading tokens whose KV is cached. No rank computes these tokens."""
        return TokenRange(0, self.chunks[0].start)

    @cached_property
    def cached_pieces(self) -> list[tuple[KvBuffer, TokenRange]]:
        """Return the memory of the cached tokens: pairs of a buffer from `prefix` and the range of prompt tokens that
        are read from this buffer."""
        pieces = [piece for piece in self.prefix if piece.tokens.start < self.cached.end]
        return [(piece, TokenRange(piece.tokens.start, min(piece.tokens.end, self.cached.end))) for piece in pieces]

    @cached_property
    def fingerprint(self) -> bytes:
        """Return the fingerprint of the job's request. It identifies the request in a crash note, the file that a
        crashed worker leaves."""
        return fingerprint(self.request_id, self.prompt_ids)

    @property
    def token_ids(self) -> list[int]:
        """Return all tokens of the sequence: the prompt, followed by the output of earlier attempts."""
        return [*self.prompt_ids, *self.output_ids]

    def _require(self, holds: bool, name: str, remedy: str) -> None:
        if not holds:
            raise InvalidArgumentError(f"job {self.number}: {name} = {getattr(self, name)!r} is wrong: {remedy}")


class KvSender(Protocol):
    """Interface through which a rank sends its own KV to the slot while the chain still runs. Called on the engine's
    thread. No method may block.

    `num_present` is the number of leading prompt tokens whose KV the slot already has. Their KV does not have to be
    pushed.

    `push` and `received` are called any number of times, then `finish` or `abort` once. There is one exception: after
    `finish`, the job's last messages to another rank may still have to be sent. If the job fails at this stage, `abort`
    is called after `finish`. No method is called after `abort`. An exception from any method except `abort` fails the
    job with this exception.
    """

    @property
    def num_present(self) -> int: ...

    def push(self, layer: int, tokens: TokenRange, data: memoryview) -> None:
        """Send KV rows (the K and V of some tokens) to the leased slot. These are rows that this rank has computed or,
        on the chain's first rank, cached rows. `data` has the rows of `tokens` in `layer`. The memory of `data` does
        not change after this call."""
        ...

    def received(self, layer: int, tokens: TokenRange, data: memoryview) -> None:
        """Handle KV rows (the K and V of some tokens) that were received from an earlier rank. `data` has the rows of
        `tokens` in `layer`, and is valid only until this call returns. The earlier rank also pushes these rows to the
        leased slot. Called only on a chain's last rank."""
        ...

    def finish(self, firsts: tuple[SampledToken, ...]) -> None:
        """Complete the job after all layers have been pushed. `firsts` are the first sampled tokens, one per choice. It
        is empty on all ranks except the last."""
        ...

    def abort(self, error: BaseException) -> None:
        """Discard all KV that was pushed to the leased slot, because the job has failed with `error`. Must not
        raise."""
        ...


@dataclass(frozen=True)
class JobReport:
    """Report of one rank's work on one job: times, and numbers of bytes and messages."""

    rank: Rank
    tokens: TokenRange
    """Range of the prompt's tokens that the rank computed."""
    start_ns: int
    """Time at which the rank began to work on the job's first layer. Unix time in nanoseconds."""
    end_ns: int
    """Time at which the rank ended its work on the job's last layer. Unix time in nanoseconds."""
    layers: tuple[Interval, ...]
    """Time interval of each layer, from its start to its end. The interval includes waits, and work on other jobs in
    between."""
    wait_s: float
    """Total seconds that the job waited for earlier ranks' KV, over all layers. If jobs are computed together, each job
    also counts the share of the other jobs in the time of each layer."""
    num_bytes_sent: int
    """Number of bytes of KV that were sent to the next rank of the chain."""
    num_messages_sent: int
    """Number of messages with KV that were sent to the next rank."""
    send_s: float
    """Total transfer time of the KV messages to the next rank, in seconds. The transfer of a message begins when the
    message is queued and the link has finished the previous one. It ends when the message has arrived."""
