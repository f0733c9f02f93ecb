"""Value types that several parts of Baton exchange, for example token ranges, KV layout, leases, sampled tokens, finish
reasons and kernel choices.

All are frozen, hold no tensors, and are safe to share between threads.
"""

import hashlib
from dataclasses import dataclass
from enum import Enum, IntEnum
from functools import cached_property
from typing import Literal, NewType, get_args

RequestId = NewType("RequestId", str)
"""Id of a client's request. All attempts of the request have the same id."""

JobId = NewType("JobId", int)
"""Number of one attempt to prefill one request. The prefill group's job scheduler assigns the numbers in ascending
order."""

StreamNumber = NewType("StreamNumber", int)
"""Number of one stream that an orchestrator opens to a generation group. Not reused when the orchestrator restarts."""

ReserveNumber = NewType("ReserveNumber", int)
"""Number of one Reserve call, which requests a lease from a generation group. A caller that does not receive the answer
can undo the call by this number. Numbers are not reused when the orchestrator restarts."""

SlotId = NewType("SlotId", int)
"""Id of a slot. A slot holds the KV of one sequence in a generation group's batch."""

Stamp = NewType("Stamp", int)
"""Number of a lease. Each new lease gets a larger stamp than all earlier ones, even after a restart of its group.
Writes with the stamp of an earlier lease of the slot are recognised as stale and refused."""

Epoch = NewType("Epoch", int)
"""Identifier of one set of connections between the ranks of a prefill group. Each time the ranks reconnect, the new
connections get a larger epoch."""

MAX_EPOCH = Epoch(2**48 - 1)
"""Largest epoch (number of a set of connections between prefill ranks) that a rank accepts. Real epochs never come
close to it. It fits into the 64-bit field of messages."""

Rank = NewType("Rank", int)
"""Index of a worker in its group, from 0."""
Dtype = Literal["bfloat16", "float32"]
"""Number format that a model is served in."""
DTYPES: tuple[Dtype, ...] = get_args(Dtype)
WeightForm = Literal["stored", "bfloat16", "int8"]
"""Form in which workers keep the weights of linear layers.

- `stored`: quantised weights as the checkpoint stores them, if kernels exist for the format and the device.
- `bfloat16`: in the dtype of the model. Quantised weights are dequantised when they are loaded.
- `int8`: rounded to int8, with one scale for each output channel.
"""
WEIGHT_FORMS: tuple[WeightForm, ...] = get_args(WeightForm)
DeviceName = Literal["auto", "cpu", "cuda", "emulated"]
"""Device that a worker computes on. `emulated` is a GPU emulated by the CPU, with separate device memory behind a
simulated link. `auto` selects the CPU."""
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Number of bytes of one element, by the dtype's name in messages."""


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
        """Split the range into consecutive ranges of at most `max_tokens` tokens each. Return an empty list for an
        empty range."""
        return [
            TokenRange(start, min(start + max_tokens, self.end)) for start in range(self.start, self.end, max_tokens)
        ]


@dataclass(frozen=True)
class KvLayout:
    """Layout of KV in memory and in messages. In each layer, the KV of one token is an array of shape `[2, kv_heads,
    head_dim]`, with K first and V second.

    Keys are stored after RoPE. The KV of a token range in one layer is called a piece
    (docs/decisions/0002-kv-layout.md).
    """

    model_fingerprint: str
    """Hash of the weights that computed the KV. KV computed with different weights is never mixed."""
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    """Element type, a key of DTYPE_BYTES."""

    @property
    def row_bytes(self) -> int:
        """Number of bytes of one token's K and V in one layer."""
        return 2 * self.num_kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def token_bytes(self) -> int:
        """Number of bytes of one token's K and V in all layers."""
        return self.num_layers * self.row_bytes

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the layout as 16 hex digits. Equal layouts have equal fingerprints."""
        text = f"{self.model_fingerprint}/{self.num_layers}/{self.num_kv_heads}/{self.head_dim}/{self.dtype}/token,kv"
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


@dataclass(frozen=True)
class LeaseRef:
    """Identity of one lease: its slot and its stamp. Every push, commit and abort carries it."""

    slot: SlotId
    stamp: Stamp


@dataclass(frozen=True)
class Lease:
    """Lease on a slot of a generation group. The lease has a time to live, and its stamp lets the group refuse writes
    under an earlier lease."""

    ref: LeaseRef
    request_id: RequestId
    attempt: int
    num_tokens: int
    """Number of tokens, at positions [0, num_tokens), whose KV must be in the slot before the lease can be
    committed."""
    endpoint: str
    """Address (`host:port`) of the KvReceiver service that granted the lease."""
    ttl_s: float
    """Seconds without a push or renewal after which the slot is freed."""
    num_present_tokens: int = 0
    """Number of leading tokens whose KV the receiver copies into the slot from its cache. Senders do not push these
    tokens."""


@dataclass(frozen=True)
class TokenLogprob:
    """Candidate token and its log-probability. The log-probability is a natural logarithm, after penalties, and before
    temperature and filters such as top-k."""

    token_id: int
    logprob: float


@dataclass(frozen=True)
class SampledToken:
    """One sampled token or one prompt token. `logprob` and `top` (the most likely candidates) are set only if the
    request asked for logprobs."""

    token_id: int
    logprob: float | None = None
    top: tuple[TokenLogprob, ...] = ()


class Priority(IntEnum):
    """Priority of a request. The values are those of the protobuf messages. Among the waiting requests of one tenant,
    lower values are served first."""

    INTERACTIVE = 1
    """Request of a user who waits for the answer."""
    STANDARD = 2
    BATCH = 3
    """Request that is not urgent. It uses the capacity that the tenant's other requests leave free."""


class FinishReason(Enum):
    """Reason why a choice ended. The last event of each choice carries one."""

    LENGTH = "length"
    """The output reached max_tokens, or prompt and output reached the model's context length."""
    STOP = "stop"
    """The output reached an end-of-sequence token, a stop token id or a stop string."""
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    ERROR = "error"


@dataclass(frozen=True)
class DraftRound:
    """Statistics of one step that verified draft tokens for one choice."""

    source: str
    """Name of the proposer of the drafts: `streaming` (the model itself with attention to few keys) or `ngram` (n-grams
    of the text). Later versions may add names."""
    num_drafts: int
    """Number of draft tokens that were verified."""
    num_accepted: int
    """Number of draft tokens that were accepted."""
    num_tokens: int
    """Number of output tokens of the step. It is the number of accepted drafts plus one. If the choice ended at an
    accepted draft, it is only the number of accepted drafts."""


@dataclass(frozen=True)
class TokenOrigin:
    """Groups that compute a choice's tokens. An origin is valid for its token and all later tokens, until a token has
    another origin."""

    generation: str
    """Name of the generation group that decodes the choice's tokens."""
    prefill: str = ""
    """Name of the prefill group whose last rank sampled the token. Empty if the generation group sampled it."""
    predicted_step_s: float = 0.0
    """Predicted duration in seconds of a generation step without drafts, for the batch at the time the attempt was
    scheduled. 0 if no prediction was made."""


@dataclass(frozen=True)
class TokenEvent:
    """One event of a request's output stream: the next token of one choice, the end of the choice, or both.

    `text` holds the characters that this event completes. It may be empty, for example after half of a UTF-8 character
    or during a possible stop string. It may include characters of earlier tokens.
    """

    index: int
    """Position of `token` in the output, from 0. For an end event without a token: the number of output tokens."""
    token: SampledToken | None
    text: str
    unix_ns: int
    """Time at which the token was sampled, in nanoseconds since the Unix epoch."""
    finish: FinishReason | None = None
    """Reason why the choice ended; None except in the choice's last event."""
    error: str = ""
    """Error message if `finish` is ERROR; otherwise empty."""
    choice: int = 0
    """Index of the choice that the event belongs to, from 0."""
    prompt: tuple[SampledToken, ...] = ()
    """Prompt tokens with their logprobs, if the request asked for prompt logprobs. Set only in the event with position
    0 of choice 0."""
    drafts: DraftRound | None = None
    """Statistics of the drafts that one step verified for the choice. Only the event with the last token of that step
    has them; they are None in all other events."""
    origin: TokenOrigin | None = None
    """Groups that computed the token. None if they are the same as for the choice's previous token."""


@dataclass(frozen=True)
class KernelChoice:
    """Fastest bfloat16 kernels on one kind of processor, as measured by `baton.modeling.kernels.choosing`."""

    processor: str
    """Kind of processor: the processor's name, and a hash of the features in which processors of the same name
    differ."""
    attention: str
    """Name of the matrix product kernel that attention uses, as listed in `baton.modeling.kernels.products`."""
    panels: str
    """Name of the matrix product kernel that linear layers in C++ use, as listed in
    `baton.modeling.kernels.products`."""
    torch_rows: int | None
    """Smallest number of input rows (tokens) for which torch computes a linear layer. With fewer rows, the C++ kernel
    computes it. 1: torch computes all linear layers; None: the C++ kernel does."""

    def __str__(self) -> str:
        if self.torch_rows == 1:
            linear = "linear layers by torch"
        elif self.torch_rows is None:
            linear = f"linear layers {self.panels}"
        else:
            linear = f"linear layers {self.panels}, from {self.torch_rows} rows on by torch"
        return f"attention {self.attention}, {linear}"
