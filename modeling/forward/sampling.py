"""From logits to tokens: a pure function of a request's history and its seed.

Runs on the engine's thread, after `decoder`, for all rows that need a token: of `prefill_workers`, which sample the
first token, and of `generate_workers.engine.step_runner`.

The logits of a row are changed in this order:
 1. repetition penalty (tokens of prompt and output), then presence and frequency penalty (tokens of the output);
 2. logit bias;
 3. min_tokens: end-of-sequence tokens (unless ignore_eos) and stop token ids are forbidden until it is reached;
    logprobs are the log-softmax of the logits after this step: before temperature and filters;
 4. temperature; below 1e-5 the row is greedy: argmax of 3, the lower id where two are equal;
 5. the filters, in vLLM's order: min-p, then top-k, then top-p, which measures its mass among what the first two keep.
    Of equally likely tokens the lower ids come first, so top-k keeps k tokens exactly.

The token is argmax(log p + g) over the kept candidates, g = Gumbel(hash(seed, output position, token id)): distributed
as p (Gumbel, 1954), and the same whatever the batch, the attempt or the other candidates are.

B rows, R random rows, C candidates of a row, V vocabulary.
"""

import math
from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from baton.sampling_params import SamplingParams
from baton.types import FinishReason, SampledToken, TokenLogprob

_GREEDY_BELOW = 1e-5
_FIRST_GUESS = 256
"""Tokens among which top-p first looks for its mass; then it looks among eight times as many, and so on."""


class SamplerState:
    """The state that sampling a request's next token depends on. A state that is rebuilt from history equals the one
    that was appended to.

    Owned by the row; `append` is the only change, and `drop` undoes it.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int] = (),
        eos_token_ids: Sequence[int] = (),
    ) -> None:
        """All ids, but those of `stop_token_ids` and `logit_bias`, must be in the model's vocabulary."""
        self.params = params
        self.output_ids: list[int] = []
        self._stop_ids = frozenset(params.stop_token_ids) | frozenset(() if params.ignore_eos else eos_token_ids)
        self._stop_id_tensor = torch.tensor(sorted(self._stop_ids), dtype=torch.int64)
        self._bias_ids = torch.tensor(list(params.logit_bias), dtype=torch.int64)
        self._bias = torch.tensor(list(params.logit_bias.values()), dtype=torch.float32)
        self._seen = _SeenTokens(prompt_ids) if _penalizes(params) else None
        for token_id in output_ids:
            self.append(token_id)

    @property
    def position(self) -> int:
        """Return the output position of the next token, from 0."""
        return len(self.output_ids)

    def append(self, token_id: int) -> None:
        """Add the token that was chosen for `position`."""
        self.output_ids.append(token_id)
        if self._seen is not None:
            self._seen.count(token_id)

    def drop(self, num_tokens: int) -> None:
        """Forget the latest tokens, as if they had never been appended."""
        for _ in range(num_tokens):
            token_id = self.output_ids.pop()
            if self._seen is not None:
                self._seen.uncount(token_id)

    def finish_after_last(self) -> FinishReason | None:
        """Return why the stream ends with the last token; None if it goes on. Stop strings are not checked."""
        if self.position > self.params.min_tokens and self.output_ids[-1] in self._stop_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if self.position >= self.params.max_tokens else None

    def adjust(self, logits_V: Tensor) -> None:
        """Apply steps 1 to 3 in place. Ids beyond the logits in `stop_token_ids` and `logit_bias` do nothing."""
        if self._seen:
            self._penalize(logits_V, *self._seen.tensors(logits_V.device))
        num_tokens = logits_V.shape[0]
        if len(self._bias_ids):
            known = self._bias_ids < num_tokens
            ids = self._bias_ids[known].to(logits_V.device)
            logits_V[ids] += self._bias[known].to(logits_V.device)
        if self.position < self.params.min_tokens and self._stop_ids:
            ids = self._stop_id_tensor[self._stop_id_tensor < num_tokens]
            logits_V[ids.to(logits_V.device)] = -math.inf

    def _penalize(self, logits_V: Tensor, ids_C: Tensor, counts_C: Tensor) -> None:
        params, logits_C = self.params, logits_V[ids_C]
        if params.repetition_penalty != 1:
            divided_C, multiplied_C = logits_C / params.repetition_penalty, logits_C * params.repetition_penalty
            logits_C = torch.where(logits_C > 0, divided_C, multiplied_C)
        logits_C = logits_C - params.frequency_penalty * counts_C - params.presence_penalty * (counts_C > 0)
        logits_V[ids_C] = logits_C


def _penalizes(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0


class _SeenTokens:
    """The distinct tokens of prompt and output, and how often each is in the output, ready for tensors."""

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        self._places = {token_id: place for place, token_id in enumerate(dict.fromkeys(prompt_ids))}
        self._ids = array("q", self._places)
        self._counts = array("f", bytes(4 * len(self._ids)))
        self._num_prompt = len(self._ids)

    def __len__(self) -> int:
        return len(self._ids)

    def count(self, token_id: int) -> None:
        """Count one more output token."""
        place = self._places.setdefault(token_id, len(self._ids))
        if place == len(self._ids):
            self._ids.append(token_id)
            self._counts.append(0)
        self._counts[place] += 1

    def uncount(self, token_id: int) -> None:
        """Undo the latest `count`, which must have been for this token."""
        place = self._places[token_id]
        self._counts[place] -= 1
        if not self._counts[place] and place >= self._num_prompt:  # only the output had it
            assert place == len(self._ids) - 1
            del self._places[token_id], self._ids[place], self._counts[place]

    def tensors(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return `(ids_C, counts_C)`, copies; at least one token must have been seen."""
        ids_C = torch.frombuffer(self._ids, dtype=torch.int64)
        counts_C = torch.frombuffer(self._counts, dtype=torch.float32)
        return ids_C.to(device, copy=True), counts_C.to(device, copy=True)


def sample(logits_BV: Tensor, states: Sequence[SamplerState]) -> list[SampledToken]:
    """Choose each row's next token; `states` are not changed, `logits_BV` (fp32) is.

    A row's token and logprobs do not depend on the other rows. A batch of greedy rows costs one argmax.
    """
    assert logits_BV.dtype == torch.float32 and logits_BV.shape[0] == len(states), (logits_BV.dtype, logits_BV.shape)
    with torch.inference_mode():
        rows = zip(logits_BV, choose(logits_BV, states), states, strict=True)
        return [_report(logits_V, token_id, state.params.logprobs) for logits_V, token_id, state in rows]


def choose(logits_BV: Tensor, states: Sequence[SamplerState]) -> list[int]:
    """Choose each row's next token, as `sample` does, and return its id; `logits_BV` (fp32) are adjusted in place."""
    for logits_V, state in zip(logits_BV, states, strict=True):
        state.adjust(logits_V)
    return _choose(logits_BV, states)


def score(logits_BV: Tensor, token_ids: Sequence[int], num_top: int) -> list[SampledToken]:
    """Return each row's given token and the `num_top` most likely, with logprobs that know no penalties or bias."""
    assert logits_BV.dtype == torch.float32 and logits_BV.shape[0] == len(token_ids)
    return [_report(logits_V, token_id, num_top) for logits_V, token_id in zip(logits_BV, token_ids, strict=True)]


def report(logits_V: Tensor, token_id: int, state: SamplerState) -> SampledToken:
    """Return a chosen token with the logprobs that the row asks for; `logits_V` are adjusted."""
    return _report(logits_V, token_id, state.params.logprobs)


def probabilities(logits_V: Tensor, params: SamplingParams) -> Tensor:
    """Return the distribution `[V]` in float64 from which a row with these adjusted logits is sampled."""
    found_V = torch.zeros(len(logits_V), dtype=torch.float64, device=logits_V.device)
    largest = float(logits_V.amax())
    if params.temperature < _GREEDY_BELOW or not math.isfinite(largest):
        found_V[logits_V.argmax()] = 1.0
        return found_V
    scaled_V = (logits_V - largest) / params.temperature
    if not _filters(params, len(logits_V)):
        return scaled_V.double().softmax(0)
    ids_C = kept_ids(scaled_V, params)
    found_V[ids_C] = scaled_V[ids_C].double().softmax(0)
    return found_V


def _choose(logits_BV: Tensor, states: Sequence[SamplerState]) -> list[int]:
    num_tokens = logits_BV.shape[1]
    drawn = [row for row, state in enumerate(states) if state.params.temperature >= _GREEDY_BELOW]
    filtered = [row for row in drawn if _filters(states[row].params, num_tokens)]
    unfiltered = [row for row in drawn if not _filters(states[row].params, num_tokens)]
    token_ids: list[int] = [0] * len(states)
    if len(drawn) < len(states):
        token_ids = logits_BV.argmax(-1).tolist()
    for row in filtered:
        token_ids[row] = _draw_filtered(logits_BV[row], states[row])
    # On a CPU row by row: a row fits the cache, and is computed alike alone and in a batch.
    block = max(len(unfiltered), 1) if logits_BV.is_cuda else 1
    for start in range(0, len(unfiltered), block):
        rows = unfiltered[start : start + block]
        for row, token_id in zip(rows, _draw(logits_BV[rows], [states[row] for row in rows]), strict=True):
            token_ids[row] = token_id
    return token_ids


def _filters(params: SamplingParams, vocab_size: int) -> bool:
    return 0 < params.top_k < vocab_size or params.top_p < 1 or params.min_p > 0


def _draw(logits_RV: Tensor, states: Sequence[SamplerState]) -> list[int]:
    """Draw one token a row among all of the vocabulary."""
    device = logits_RV.device
    temperatures_R1 = torch.tensor([[state.params.temperature] for state in states], dtype=torch.float32, device=device)
    scaled_RV = (logits_RV - logits_RV.amax(-1, keepdim=True)) / temperatures_R1
    ids_V = torch.arange(logits_RV.shape[1], device=device)
    keys_R = [noise_key(state.params.seed, state.position) for state in states]
    token_ids: list[int] = gumbel_noise(keys_R, ids_V).add_(scaled_RV).argmax(-1).tolist()
    return token_ids


def _draw_filtered(logits_V: Tensor, state: SamplerState) -> int:
    """Draw one token among those that the row's filters keep."""
    largest = float(logits_V.amax())
    if not math.isfinite(largest):  # every token is forbidden, or the logits are NaN: there is no distribution
        return int(logits_V.argmax())
    scaled_V = (logits_V - largest) / state.params.temperature
    ids_C = kept_ids(scaled_V, state.params)
    noise_RC = gumbel_noise([noise_key(state.params.seed, state.position)], ids_C)
    return int(ids_C[(noise_RC[0] + scaled_V[ids_C]).argmax()])


def kept_ids(scaled_V: Tensor, params: SamplingParams) -> Tensor:
    """Return the ids of the candidates that min-p, top-k and top-p leave; `scaled_V`: logits over temperature, the
    largest 0.

    The vocabulary is sorted only if the mass that top-p asks for is spread over an eighth of it.
    """
    num_tokens = scaled_V.shape[0]
    floor = math.log(params.min_p) if params.min_p else -math.inf
    top_k = params.top_k if 0 < params.top_k < num_tokens else None
    if top_k is None and params.top_p == 1:
        return (scaled_V.double() >= floor).nonzero().flatten()
    if top_k is not None:
        ids_C = _largest(scaled_V, top_k)
        mass_C = _mass(scaled_V[ids_C], floor)
        return ids_C[_reaches(mass_C, params.top_p, mass_C.sum())]
    total, size = _mass(scaled_V, floor).sum(), min(_FIRST_GUESS, num_tokens)
    while True:
        ids_C = _largest(scaled_V, size)
        mass_C = _mass(scaled_V[ids_C], floor)
        if size == num_tokens or mass_C.sum() >= params.top_p * total:
            return ids_C[_reaches(mass_C, params.top_p, total)]
        size = 8 * size if 64 * size < num_tokens else num_tokens


def _mass(scaled: Tensor, floor: float) -> Tensor:
    """Return probabilities, not normalised, in float64; 0 below min-p's floor."""
    scaled = scaled.double()
    return scaled.exp().masked_fill_(scaled < floor, 0.0)


def _reaches(mass_C: Tensor, top_p: float, total: Tensor) -> Tensor:
    """Return True for the shortest prefix of `mass_C` (in descending order) that holds `top_p` of `total`."""
    kept_C = mass_C > 0
    if top_p < 1:
        kept_C &= mass_C.cumsum(0) - mass_C < top_p * total
    kept_C[0] = True
    return kept_C


def _largest(values_V: Tensor, count: int) -> Tensor:
    """Return the ids of the `count` largest values, in descending order; of equal values the lower ids come first."""
    if count == 0:
        return torch.empty(0, dtype=torch.int64, device=values_V.device)
    if 8 * count >= values_V.shape[0]:
        return values_V.sort(descending=True, stable=True).indices[:count]
    smallest = values_V.topk(count).values[-1]
    ids = (values_V >= smallest).nonzero().flatten()
    return ids[values_V[ids].sort(descending=True, stable=True).indices[:count]]


def _report(logits_V: Tensor, token_id: int, num_top: int | None) -> SampledToken:
    if num_top is None:
        return SampledToken(token_id)
    total = logits_V.double().logsumexp(0)
    top_ids = _largest(logits_V, min(num_top, len(logits_V)))
    ids = torch.cat((top_ids.new_tensor([token_id]), top_ids))
    chosen, *top = (logits_V[ids].double() - total).tolist()
    return SampledToken(token_id, chosen, tuple(map(TokenLogprob, top_ids.tolist(), top)))


_MASK = 2**64 - 1
_STEP = 0x9E3779B97F4A7C15
_FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_SHIFTS = (30, 27, 31)
"""SplitMix64 (Steele, Lea, Flood, 2014): its step, and the multiplications and shifts of its finaliser."""
_NOISE_BITS = 52


def noise_key(seed: int, position: int) -> int:
    """Return the unsigned 64-bit hash from which the noise of all tokens at an output position is derived."""
    return _mix(_mix(seed + _STEP) + (position + 1) * _STEP)


def _mix(value: int) -> int:
    value &= _MASK
    for shift, factor in zip(_SHIFTS, (*_FACTORS, 1), strict=True):
        value = (value ^ (value >> shift)) * factor & _MASK
    return value


def draw(weights_V: Tensor, key: int) -> int:
    """Draw a token in proportion to weights, float64, of which one is above 0; the same for the same key."""
    noise_RV = gumbel_noise([key], torch.arange(len(weights_V), device=weights_V.device))
    return int((noise_RV[0] + weights_V.log()).argmax())


def uniform(key: int) -> float:
    """Return a number above 0 and below 1, a function of the key alone."""
    return ((_mix(key + _STEP) >> (64 - _NOISE_BITS)) + 0.5) * 2.0**-_NOISE_BITS


def gumbel_noise(keys_R: Sequence[int], ids_C: Tensor) -> Tensor:
    """Return standard Gumbel noise `[R, C]` in float64, a function of (key, token id) alone, finite.

    -log(-log u) with u = (52 hash bits + 1/2) / 2^52, which float64 holds exactly and which is never 0 or 1.
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
    """Shift int64 right as if it were unsigned; torch's own shift repeats the sign."""
    return (bits >> shift).bitwise_and_((1 << (64 - shift)) - 1)


def _signed(value: int) -> int:
    """Return an unsigned 64-bit integer as the int64 with the same bits."""
    return value - 2**64 if value >= 2**63 else value
