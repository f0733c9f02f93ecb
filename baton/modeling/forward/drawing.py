"""Draws the next tokens from adjusted logits, with temperature, filters, and noise from the request's seed.

`sampling` adjusts logits to a request's history, and then draws with this module. There are two implementations with
the same filters and the same noise:

- On a CPU, and on a GPU without Triton, tokens are drawn one sequence after another. Only as many tokens are examined
  as the filters may keep.
- `choose_tokens` draws for a whole batch with Triton's kernels. The host reads nothing, so that `step_graphs` can
  launch the next step before the tokens are drawn.

Filters are applied in the order of vLLM: min-p, top-k, top-p. The probabilities for top-p are normalised over the
tokens that min-p and top-k keep. Equally likely tokens are ordered by id, so top-k keeps exactly k tokens.

The drawn token is argmax(log p + g) over the kept candidates, where p is the probability of a candidate and g =
Gumbel(hash(seed, output position, token id)). The token is then distributed as p (Gumbel, 1954). It does not depend on
the batch, the attempt or the other candidates.

Shape letters: B or R rows (sequences), C candidates of a row, V vocabulary size.
"""

import math
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple, Self

import torch
from torch import Tensor

from baton.modeling.device.sending import to_device
from baton.modeling.kernels import native
from baton.modeling.kernels.triton.sampler.sampler import draw_tokens
from baton.sampling_params import SamplingParams

NO_TOKEN = -1
"""Token id that stands for an invalid result: the row of logits contains NaN or plus infinity."""
NO_LOGPROBS = -1
"""Value of `RowDraw.num_top` for a sequence without logprobs."""
_GREEDY_BELOW = 1e-5
_ALL = 2**62
"""Value of top_k that keeps all tokens."""
_FIRST_GUESS = 256
"""Number of most likely tokens that top-p examines first. If their total probability is too small, the number is
multiplied by eight."""


class DrawKind(IntEnum):
    """Kind of drawing that a batch needs. Each kind can also handle sequences that need a kind with a lower value."""

    GREEDY = 0
    """Take the most likely token."""
    DRAWN = 1
    """Draw a token from the whole vocabulary."""
    FILTERED = 2
    """Draw a token among those that min-p, top-k and top-p keep."""


class RowDraw(NamedTuple):
    """Parameters for drawing the next token of one sequence, as plain numbers."""

    key: int
    """Unsigned 64-bit hash of the request's seed and the output position, reinterpreted as a signed int64. 0 for a
    greedy sequence."""
    top_k: int
    floor: float
    """Logarithm of min_p. A candidate is dropped if its log-probability minus that of the most likely token is below
    this value."""
    top_p: float
    temperature: float
    """Divisor of the logits. 0: greedy."""
    num_top: int = NO_LOGPROBS
    """Number of most likely tokens whose logprobs are reported in addition to that of the drawn token. NO_LOGPROBS: no
    logprobs are reported. It does not affect the drawn token, and is not part of `Draws`."""

    @classmethod
    def of(cls, params: SamplingParams, position: int) -> "RowDraw":
        """Return the parameters for drawing the token at an output position, counted from 0."""
        num_top = NO_LOGPROBS if params.logprobs is None else params.logprobs
        if is_greedy(params):
            return _GREEDY._replace(num_top=num_top)
        key = _signed(noise_key(params.seed, position))
        return cls(key, params.top_k or _ALL, _floor(params), params.top_p, params.temperature, num_top)

    def kind(self, vocab_size: int) -> DrawKind:
        """Return the kind of drawing that these parameters need for logits of `vocab_size` tokens."""
        if not self.temperature:
            return DrawKind.GREEDY
        is_filtered = self.top_k < vocab_size or self.top_p < 1 or self.floor > -math.inf
        return DrawKind.FILTERED if is_filtered else DrawKind.DRAWN


_GREEDY = RowDraw(key=0, top_k=_ALL, floor=-math.inf, top_p=1.0, temperature=0.0)


class Draws(NamedTuple):
    """Drawing parameters of a batch of sequences: the first fields of RowDraw as tensors on the logits' device.
    Integers are int64, temperatures float32, other numbers float64."""

    key_B: Tensor
    top_k_B: Tensor
    floor_B: Tensor
    top_p_B: Tensor
    temperature_B: Tensor

    @classmethod
    def of(cls, rows: Sequence[RowDraw], device: torch.device) -> Self:
        """Copy the drawing parameters of several sequences to tensors on a device."""
        dtypes = (torch.int64, torch.int64, torch.float64, torch.float64, torch.float32)
        columns = zip(zip(*rows, strict=True), dtypes, strict=False)
        return cls(*(to_device(torch.tensor(column, dtype=dtype), device) for column, dtype in columns))

    def first(self, num_rows: int) -> Self:
        """Return views of the first `num_rows` entries of each tensor."""
        return type(self)(*(column_B[:num_rows] for column_B in self))


def is_greedy(params: SamplingParams) -> bool:
    """Return True if the most likely token is always chosen (temperature below 1e-5). Seed and filters then have no
    effect."""
    return params.temperature < _GREEDY_BELOW


def choose_tokens(logits_BV: Tensor, draws: Draws, kind: DrawKind) -> Tensor:
    """Choose the next token of each row of logits, `[B]`, int64, without waiting for the device. `kind` is the largest
    DrawKind that any of the rows needs. All kinds except greedy ones need Triton, and a GPU or Triton's interpreter.

    If the largest logit of a row is not finite, no token can be drawn, and the result is that of `largest_tokens`.
    """
    if kind is DrawKind.GREEDY:
        return largest_tokens(logits_BV)
    return draw_tokens(logits_BV, draws, filters=kind is DrawKind.FILTERED)


def compile_draws(logits_BV: Tensor) -> None:
    """Compile the Triton kernels of all kinds of drawing for a vocabulary. They are the same for all batches. The
    logits may have any values."""
    draws = Draws.of([_GREEDY] * len(logits_BV), logits_BV.device)
    for kind in DrawKind:
        choose_tokens(logits_BV, draws, kind)


def largest_tokens(logits_BV: Tensor) -> Tensor:
    """Return the index of the largest logit of each row, `[B]`, int64. For equal logits, the lower index is returned.
    The result is NO_TOKEN for a row that contains NaN or plus infinity. If all logits of a row are minus infinity, the
    result is 0. Does not wait for the device."""
    found_B = logits_BV.argmax(-1)
    is_token_B = logits_BV.gather(-1, found_B.unsqueeze(-1)).squeeze(-1) < math.inf
    return found_B.masked_fill_(~is_token_B, NO_TOKEN)


def choose_by_rows(logits_BV: Tensor, rows: Sequence[tuple[SamplingParams, int]]) -> list[int]:
    """Return the next token of each row of logits. The result is NO_TOKEN for a row that contains NaN or plus infinity.
    `rows` contains the sampling parameters and the output position of each row.

    Tokens are drawn one row after another, because one row of logits fits into a CPU's cache. The token of a row does
    not depend on the other rows. The C++ kernel (baton/modeling/kernels/sampling/draws.cpp) is used if it is available.
    Torch's operations take up to ten times as long.
    """
    drawing = [row for row, (params, _) in enumerate(rows) if not is_greedy(params)]
    token_ids: list[int] = [0] * len(rows)
    is_native = has_native_draws(logits_BV)
    if len(drawing) < len(rows):
        token_ids = (native.operators().largest_tokens if is_native else largest_tokens)(logits_BV).tolist()
    if not drawing:
        return token_ids
    if not is_native:
        for row in drawing:
            params, position = rows[row]
            token_ids[row] = draw_row(logits_BV[row], params, noise_key(params.seed, position))
        return token_ids
    draws = Draws.of([RowDraw.of(*rows[row]) for row in drawing], logits_BV.device)
    found: list[int] = native.operators().draw_tokens(logits_BV, torch.tensor(drawing), draws).tolist()
    for row, token_id in zip(drawing, found, strict=True):
        token_ids[row] = token_id if token_id >= 0 else int(largest_tokens(logits_BV[row]))  # no distribution
    return token_ids


def has_native_draws(logits_BV: Tensor) -> bool:
    """Return True if the C++ kernel is available and supports the device, dtype and strides of these logits."""
    fits = logits_BV.device.type == "cpu" and logits_BV.dtype == torch.float32 and logits_BV.stride(1) == 1
    return fits and native.load()


def draw_row(logits_V: Tensor, params: SamplingParams, key: int) -> int:
    """Draw the next token of one sequence with torch's operations. `params` must not be greedy. Return NO_TOKEN if a
    logit is NaN or plus infinity."""
    largest = logits_V.amax()
    if not math.isfinite(largest):  # every token is forbidden, or the logits are NaN: the row has no distribution
        return int(largest_tokens(logits_V))
    scaled_V = (logits_V - largest) / params.temperature
    if not filters(params, len(logits_V)):
        ids_V = torch.arange(len(logits_V), device=logits_V.device)
        return int(gumbel_noise([key], ids_V)[0].add_(scaled_V).argmax())
    ids_C = kept_ids(scaled_V, params)
    return int(ids_C[gumbel_noise([key], ids_C)[0].add_(scaled_V[ids_C]).argmax()])


def filters(params: SamplingParams, vocab_size: int) -> bool:
    """Return True if min-p, top-k or top-p of `params` may drop some of `vocab_size` tokens."""
    return 0 < params.top_k < vocab_size or params.top_p < 1 or params.min_p > 0


def kept_ids(scaled_V: Tensor, params: SamplingParams) -> Tensor:
    """Return the ids of the candidates that min-p, top-k and top-p keep. `scaled_V` contains the logits divided by the
    temperature, minus their maximum.

    The whole vocabulary is sorted only if top-p needs more than an eighth of it.
    """
    num_tokens, floor = scaled_V.shape[0], _floor(params)
    top_k = params.top_k if 0 < params.top_k < num_tokens else None
    if top_k is None and params.top_p == 1:
        return (scaled_V.double() >= floor).nonzero().flatten()
    if top_k is not None:
        ids_C = largest_ids(scaled_V, top_k)
        mass_C = _mass(scaled_V[ids_C], floor)
        return ids_C[_reaches(mass_C, params.top_p, mass_C.sum())]
    total, size = _mass(scaled_V, floor).sum(), min(_FIRST_GUESS, num_tokens)
    while True:
        ids_C = largest_ids(scaled_V, size)
        mass_C = _mass(scaled_V[ids_C], floor)
        if size == num_tokens or mass_C.sum() >= params.top_p * total:
            return ids_C[_reaches(mass_C, params.top_p, total)]
        size = 8 * size if 64 * size < num_tokens else num_tokens


def _floor(params: SamplingParams) -> float:
    return math.log(params.min_p) if params.min_p else -math.inf


def _mass(scaled_C: Tensor, floor: float) -> Tensor:
    """Return probabilities, not normalised, in float64. They are 0 below min-p's floor."""
    scaled_C = scaled_C.double()
    return scaled_C.exp().masked_fill_(scaled_C < floor, 0.0)


def _reaches(mass_C: Tensor, top_p: float, total: Tensor) -> Tensor:
    """Return True for the shortest prefix (in descending order) whose mass is at least `top_p` times `total`."""
    before_C = mass_C.cumsum(0) - mass_C
    kept_C = (mass_C > 0) & ((before_C < top_p * total) | (top_p >= 1))
    kept_C[0] = True
    return kept_C


def largest_ids(values_V: Tensor, count: int) -> Tensor:
    """Return the indices of the `count` largest values, in descending order of the values. For equal values, lower
    indices come first."""
    if count == 0:
        return torch.empty(0, dtype=torch.int64, device=values_V.device)
    if 8 * count >= values_V.shape[0]:
        return values_V.sort(descending=True, stable=True).indices[:count]
    smallest = values_V.topk(count).values[-1]
    ids = (values_V >= smallest).nonzero().flatten()
    return ids[values_V[ids].sort(descending=True, stable=True).indices[:count]]


_MASK = 2**64 - 1
_STEP = 0x9E3779B97F4A7C15
_FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_SHIFTS = (30, 27, 31)
"""Shift counts of the finaliser of SplitMix64 (Steele, Lea, Flood, 2014), a hash function. `_STEP` and `_FACTORS` are
its other constants."""
_NOISE_BITS = 52


def noise_key(seed: int, position: int) -> int:
    """Return the unsigned 64-bit hash of a seed and an output position. The noise of all tokens at this position is
    derived from it."""
    return _mix(_mix(seed + _STEP) + (position + 1) * _STEP)


def _mix(value: int) -> int:
    value &= _MASK
    for shift, factor in zip(_SHIFTS, (*_FACTORS, 1), strict=True):
        value = (value ^ (value >> shift)) * factor & _MASK
    return value


def draw(weights_V: Tensor, key: int) -> int:
    """Draw a token id with a probability in proportion to its weight. `weights_V` is float64, with at least one weight
    above 0. The result depends only on the weights and the key."""
    noise_RV = gumbel_noise([key], torch.arange(len(weights_V), device=weights_V.device))
    return int((noise_RV[0] + weights_V.log()).argmax())


def uniform(key: int) -> float:
    """Return a pseudo-random number above 0 and below 1. It depends only on the key."""
    return ((_mix(key + _STEP) >> (64 - _NOISE_BITS)) + 0.5) * 2.0**-_NOISE_BITS


def gumbel_noise(keys_R: Sequence[int], ids_C: Tensor) -> Tensor:
    """Return standard Gumbel noise `[R, C]` in float64. All values are finite and depend only on the key and the token
    id.

    The noise is -log(-log u) with u = (h + 1/2) / 2^52, where h is an integer of 52 hash bits. float64 represents u
    exactly, and u is never 0 or 1.
    """
    keys_R1 = torch.tensor([_signed(key) for key in keys_R], device=ids_C.device).unsqueeze(1)
    bits_RC = (ids_C + 1).mul_(_signed(_STEP)) + keys_R1  # int64 arithmetic wraps around, as the hash needs it
    for shift, factor in zip(_SHIFTS, (*_FACTORS, 1), strict=True):
        bits_RC.bitwise_xor_(_logical_shift(bits_RC, shift))
        if factor != 1:
            bits_RC.mul_(_signed(factor))
    uniform_RC = _logical_shift(bits_RC, 64 - _NOISE_BITS).double().add_(0.5).mul_(2.0**-_NOISE_BITS)
    return uniform_RC.log_().neg_().log_().neg_()


def _logical_shift(bits: Tensor, shift: int) -> Tensor:
    """Shift int64 right as if it were unsigned. Torch's own shift repeats the sign."""
    return (bits >> shift).bitwise_and_((1 << (64 - shift)) - 1)


def _signed(value: int) -> int:
    """Return an unsigned 64-bit integer as the int64 with the same bits."""
    return value - 2**64 if value >= 2**63 else value
