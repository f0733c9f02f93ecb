"""What a rank is asked to do, where its results go, and what it reports: plain values and one port.

Step 4 of a request's way (DESIGN.md, section 4).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from math import inf, isfinite
from typing import Protocol

from baton.errors import InvalidArgumentError
from baton.ids import Epoch, JobId, Rank, RequestId
from baton.sampling_params import SamplingParams
from baton.types import SampledToken, TokenRange
from modeling.kv.buffers import KvBuffer


@dataclass(frozen=True)
class Job:
    """One attempt at prefilling one request. All of its ranks get the same.

    `ranks[i]` computes `chunks[i]`. The chunks are consecutive and end with the prompt, which is `prompt_ids` followed
    by `output_ids`; what lies before the first chunk is cached, in `prefix`. Raises InvalidArgumentError otherwise.
    """

    number: JobId
    epoch: Epoch
    request_id: RequestId
    attempt: int
    ranks: tuple[Rank, ...]
    """Ascending; one or more of the group's ranks."""
    chunks: tuple[TokenRange, ...]
    prompt_ids: Sequence[int]
    output_ids: Sequence[int] = ()
    """Tokens that an earlier attempt emitted."""
    params: SamplingParams = field(default_factory=SamplingParams)
    """Of all choices, which have the prompt in common."""
    prefix: tuple[KvBuffer, ...] = ()
    """Consecutive pieces of KV, of at least the tokens [0, chunks[0].start) together, which every rank of a node reads
    from the same memory; never written. Empty when nothing is cached."""
    due_s: float = 0.0
    """Unix seconds: of two jobs that could go on, the one due earlier does; of two due at once, the lower number."""
    layer_s: float = 0.0
    """Predicted seconds of the longest layer of any of the job's ranks; 0 when unknown."""

    def __post_init__(self) -> None:
        ranks, chunks = self.ranks, self.chunks
        self._require(isfinite(self.due_s), "due_s", "use a time in unix seconds")
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
        """The tokens whose KV nobody computes."""
        return TokenRange(0, self.chunks[0].start)

    @cached_property
    def cached_pieces(self) -> list[tuple[KvBuffer, TokenRange]]:
        """`cached`, as it lies in memory: a piece of `prefix`, and which of its tokens."""
        pieces = [piece for piece in self.prefix if piece.tokens.start < self.cached.end]
        return [(piece, TokenRange(piece.tokens.start, min(piece.tokens.end, self.cached.end))) for piece in pieces]

    @property
    def token_ids(self) -> list[int]:
        """The whole prompt."""
        return [*self.prompt_ids, *self.output_ids]

    def _require(self, holds: bool, name: str, remedy: str) -> None:
        if not holds:
            raise InvalidArgumentError(f"job {self.number}: {name} = {getattr(self, name)!r} is wrong: {remedy}")


class KvOutlet(Protocol):
    """Where a rank's own KV leaves to, while the chain still runs. Called on the engine's thread; must not block.

    `num_present`: tokens, from the beginning, that are there already: nobody need push them.

    After any number of `push` and `received` comes one `finish`, one `abort`, or, when the job fails between its last
    computation and its last message, both. Nothing follows an `abort`. An exception from any other fails the job with
    it.
    """

    @property
    def num_present(self) -> int: ...

    def push(self, layer: int, tokens: TokenRange, data: memoryview) -> None:
        """`data` are the rows of `tokens` in `layer`; they never change again."""
        ...

    def received(self, layer: int, tokens: TokenRange, data: memoryview) -> None:
        """On a chain's last rank: `data` are the rows of `tokens` in `layer` that earlier ranks computed, and push.
        They are there until this returns."""
        ...

    def finish(self, firsts: tuple[SampledToken, ...]) -> None:
        """All layers were pushed; on the last rank with each choice's next token, empty elsewhere."""
        ...

    def abort(self, error: BaseException) -> None:
        """The job failed; what was pushed is worthless. Must not raise."""
        ...


@dataclass(frozen=True)
class TimeSpan:
    """Half-open interval of wall-clock time."""

    start_unix_ns: int
    end_unix_ns: int


@dataclass(frozen=True)
class JobReport:
    """What one rank did for one job."""

    rank: Rank
    run: TimeSpan
    """Its first turn to its last."""
    layers: tuple[TimeSpan, ...]
    """One a layer, waits and other jobs' turns included."""
    wait_s: float
    """Seconds in which the job had nothing to do but wait for earlier ranks' KV, all layers."""
    num_bytes_sent: int
    """KV payload sent on to the next rank of the chain."""
    num_messages_sent: int
    """That these bytes went in."""
    send_s: float
    """Seconds in which they were on their way: each from when the link was free for it to its arrival."""
