"""Values that several parts exchange: token ranges, KV layout, leases, sampled tokens, finish reasons, kernel choices.

All are frozen, hold no tensors, and are safe to share between threads.
"""

import hashlib
from dataclasses import dataclass
from enum import Enum, IntEnum
from functools import cached_property
from typing import Literal, NewType, get_args

RequestId = NewType("RequestId", str)
"""Id of a client's request, the same for all of its attempts."""

JobId = NewType("JobId", int)
"""Number of one attempt at prefilling one request, assigned in ascending order by the group's job scheduler."""

StreamNumber = NewType("StreamNumber", int)
"""Number of one stream that an orchestrator opens at a generation group; unique across the orchestrator's restarts."""

ReserveNumber = NewType("ReserveNumber", int)
"""Number of one Reserve call, unique across the orchestrator's restarts. A call without an answer is undone by it."""

SlotId = NewType("SlotId", int)
"""Id of a slot: the place of one sequence in a generation group's batch."""

Stamp = NewType("Stamp", int)
"""Generation of a slot, raised by every lease of that slot, so that a late writer is recognised."""

Epoch = NewType("Epoch", int)
"""Number of one incarnation of a prefill group's links."""

MAX_EPOCH = Epoch(2**48 - 1)
"""The highest epoch that a rank joins: far beyond what links ever reach, and well within the field's 64 bits."""

Rank = NewType("Rank", int)
"""A worker's place in its group, from 0."""
Dtype = Literal["bfloat16", "float32"]
"""Number format that a model is served in."""
DTYPES: tuple[Dtype, ...] = get_args(Dtype)
Quantization = Literal["none", "int8"]
"""Quantization of projections' weights: none, or rounded to int8 with one scale an output."""
QUANTIZATIONS: tuple[Quantization, ...] = get_args(Quantization)
DeviceName = Literal["auto", "cpu", "cuda", "emulated"]
"""Device that a worker computes on: the CPU, a GPU, or a GPU that the CPU emulates, with own memory behind a link."""
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of one element, by the dtype's name on the wire."""


@dataclass(frozen=True, order=True)
class TokenRange:
    """Token positions [start, end) of one sequence, counted from the first prompt token."""

    start: int
    end: int

    def __post_init__(self) -> None:
        assert 0 <= self.start <= self.end, f"bad token range [{self.start}, {self.end})"

    def __len__(self) -> int:
        return self.end - self.start

    def split(self, max_tokens: int) -> "list[TokenRange]":
        """Return consecutive parts of at most `max_tokens` tokens each, in order; none for an empty range."""
        return [
            TokenRange(start, min(start + max_tokens, self.end)) for start in range(self.start, self.end, max_tokens)
        ]


@dataclass(frozen=True)
class KvLayout:
    """Layout of KV in memory and on the wire: per layer, per token one row `[2, kv_heads, head_dim]` (K, then V).

    Keys are stored after RoPE. A layer's token range is one piece (docs/decisions/0002-kv-layout.md).
    """

    model_fingerprint: str
    """Hash of the weights that made the KV; KV of other weights is never mixed with it."""
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    """Element type, a key of DTYPE_BYTES."""

    @property
    def row_bytes(self) -> int:
        """Bytes of one token in one layer, K and V."""
        return 2 * self.num_kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in all layers, K and V."""
        return self.num_layers * self.row_bytes

    @cached_property
    def fingerprint(self) -> str:
        """Sixteen hex digits that are equal exactly when two layouts are."""
        text = f"{self.model_fingerprint}/{self.num_layers}/{self.num_kv_heads}/{self.head_dim}/{self.dtype}/token,kv"
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


@dataclass(frozen=True)
class LeaseRef:
    """Identifies one lease of one slot. Every push, commit and abort carries it."""

    slot: SlotId
    stamp: Stamp


@dataclass(frozen=True)
class Lease:
    """A timed, fenced claim on a slot of a generation group."""

    ref: LeaseRef
    request_id: RequestId
    attempt: int
    num_tokens: int
    """Tokens whose KV must be present before commit: positions [0, num_tokens)."""
    endpoint: str
    """Address, host:port, of the KvReceiver that granted the lease."""
    ttl_s: float
    """Seconds without a push or renewal after which the slot is freed."""
    num_present_tokens: int = 0
    """Leading tokens whose KV the receiver puts into the slot itself: senders do not push it."""


@dataclass(frozen=True)
class TokenLogprob:
    """A candidate token and its log-probability (natural log, after penalties, before temperature and filters)."""

    token_id: int
    logprob: float


@dataclass(frozen=True)
class SampledToken:
    """One sampled token, or one of a prompt. `logprob` and `top` are filled only if the request asked for logprobs."""

    token_id: int
    logprob: float | None = None
    top: tuple[TokenLogprob, ...] = ()


class Priority(IntEnum):
    """Urgency of a request, by the wire's numbers: of a tenant's waiting requests, lower numbers are served first."""

    INTERACTIVE = 1
    """A person waits for the answer."""
    STANDARD = 2
    BATCH = 3
    """Work without haste: it gets the capacity that the tenant's other requests leave."""


class FinishReason(Enum):
    """Why a stream ended: its one terminal event carries one of these."""

    LENGTH = "length"
    """The output reached max_tokens, or prompt and output reached the model's context length."""
    STOP = "stop"
    """The output reached an end-of-sequence token, a stop token id or a stop string."""
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    ERROR = "error"


@dataclass(frozen=True)
class DraftRound:
    """A step that verified drafts for one choice."""

    source: str
    """Name of the proposer: streaming (the model over few keys) or ngram (the text). Later versions may add others."""
    num_drafts: int
    """Drafts that were verified."""
    num_accepted: int
    """Drafts that became tokens."""
    num_tokens: int
    """Output tokens of the step: the accepted drafts and one more token, unless the choice ended with a draft."""


@dataclass(frozen=True)
class TokenOrigin:
    """Groups that make a choice's tokens, starting at one token."""

    generation: str
    """Name of the generation group that decodes the choice."""
    prefill: str = ""
    """Name of the prefill group whose last rank sampled this one token; empty: the generation group did."""
    predicted_step_s: float = 0.0
    """Predicted seconds of a step of the generation group without drafts, with the sequences that it had when the
    attempt was placed; 0 where nothing was predicted."""


@dataclass(frozen=True)
class TokenEvent:
    """One event of a stream: one choice's next token, or its end, or both.

    `text` holds the characters that became certain with this event. It may be empty (half a UTF-8 character, a possible
    stop string) and may belong to earlier tokens.
    """

    index: int
    """Output position of `token`, from 0; in an end without a token, the number of output tokens."""
    token: SampledToken | None
    text: str
    unix_ns: int
    """When the token was made, in unix nanoseconds."""
    finish: FinishReason | None = None
    """Why the choice ended; set on the choice's last event only."""
    error: str = ""
    """Description of the error, when `finish` is ERROR."""
    choice: int = 0
    """Index of the request's choice that the event belongs to."""
    prompt: tuple[SampledToken, ...] = ()
    """The prompt's tokens with their logprobs, if these were asked for; sent with position 0 of choice 0."""
    drafts: DraftRound | None = None
    """The drafts that were verified for the choice in one step; set on the step's last token."""
    origin: TokenOrigin | None = None
    """The groups that the token comes from; set where they differ from those of the choice's token before."""


@dataclass(frozen=True)
class KernelChoice:
    """Kernels for bfloat16 on one kind of processor, chosen by measurements (`baton.modeling.kernels.choosing`)."""

    processor: str
    """Kind of processor: its name, and a hash of the features that distinguish it from others of that name."""
    attention: str
    """Kind of product that attention uses, named in `baton.modeling.kernels.products`."""
    panels: str
    """Kind of product that linear layers in C++ use, named in `baton.modeling.kernels.products`."""
    torch_rows: int | None
    """Number of rows from which a linear layer is computed by torch: 1 for always, None for never."""

    def __str__(self) -> str:
        if self.torch_rows == 1:
            linear = "linear layers by torch"
        elif self.torch_rows is None:
            linear = f"linear layers {self.panels}"
        else:
            linear = f"linear layers {self.panels}, from {self.torch_rows} rows on by torch"
        return f"attention {self.attention}, {linear}"
