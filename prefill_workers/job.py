"""The values that describe a prefill job and its report, and KvSender, the port through which its KV leaves the rank.

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
    """One attempt at prefilling one request. All of its ranks get an equal Job. `ranks[i]` computes `chunks[i]`. The
    chunks are consecutive and end with the prompt, which is `prompt_ids` followed by `output_ids`; tokens before the
    first chunk are cached, in `prefix`. Raises InvalidArgumentError otherwise."""

    number: JobId
    epoch: Epoch
    request_id: RequestId
    attempt: int
    ranks: tuple[Rank, ...]
    """The group's ranks that compute the job, one or more, ascending."""
    chunks: tuple[TokenRange, ...]
    prompt_ids: Sequence[int]
    output_ids: Sequence[int] = ()
    """Tokens that earlier attempts emitted."""
    params: SamplingParams = field(default_factory=SamplingParams)
    """Sampling parameters of the request, whose choices share this prompt."""
    prefix: tuple[KvBuffer, ...] = ()
    """Consecutive pieces of cached KV that together have at least the tokens [0, chunks[0].start). Never written; all
    ranks of a node read them from the same memory. Empty when no prefix is cached."""
    due_s: float = 0.0
    """Seconds on the orchestrator's clock. A rank serves the runnable job due first, and of equals the one with the
    lower number."""
    layer_s: float = 0.0
    """Predicted seconds of the longest layer on any of the job's ranks; 0 when unknown."""
    masks: "Future[list[ChoiceMasks]] | None" = None
    """On the last rank, future of the masks of a constrained output's first token, the same for all choices; else None.
    The job computes while the form is compiled, and no other job waits for it."""

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
        """Return the cached tokens by their place in memory: pairs of a piece of `prefix` and its used tokens."""
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
    """The port through which a rank's own KV leaves while the chain still runs. Called on the engine's thread; no
    method may block.

    `num_present` is the number of first tokens whose KV the slot has already, so that no rank has to push it. After any
    number of calls of `push` and `received` follows one of `finish` or `abort`. If the job fails between its last
    computation and its last message, `abort` follows `finish`. No call follows `abort`. An exception from any method
    except `abort` fails the job with that exception.
    """

    @property
    def num_present(self) -> int: ...

    def push(self, layer: int, tokens: TokenRange, data: memoryview) -> None:
        """Take the rows of `tokens` in `layer`, which `data` holds; they never change again."""
        ...

    def received(self, layer: int, tokens: TokenRange, data: memoryview) -> None:
        """Take the rows of `tokens` in `layer`, which earlier ranks computed and push themselves. Called on a chain's
        last rank. `data` holds the rows, and is valid only until this call returns."""
        ...

    def finish(self, firsts: tuple[SampledToken, ...]) -> None:
        """Complete the job: all layers were pushed. `firsts`: each choice's next token on the last rank, else empty."""
        ...

    def abort(self, error: BaseException) -> None:
        """Discard all pushed rows, because the job has failed. Must not raise."""
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
    """One interval per layer, waits and other jobs' turns included."""
    wait_s: float
    """Seconds in which the job could only wait for earlier ranks' KV, summed over all layers."""
    num_bytes_sent: int
    """Bytes of KV sent to the chain's next rank."""
    num_messages_sent: int
    """Number of messages in which `num_bytes_sent` were sent."""
    send_s: float
    """Seconds of transfer of these messages, each from the time when the link was free for it to its arrival."""
