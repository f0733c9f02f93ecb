"""Samples tokens from logits. The result depends only on the logits, a request's history and its seed.

Sampling runs on the engine's thread, after `decoder`, for all sequences that need a token. `prefill_workers` samples
the first token of a request with this module, and `generate_workers.engine.model_runner` samples the others.

The logits of a sequence are changed in this order:

 1. Repetition penalty (tokens of prompt and output), then presence and frequency penalty (tokens of the output).
 2. Logit bias.
 3. Forbidden tokens. Until min_tokens is reached, stop token ids and (unless ignore_eos) end-of-sequence tokens
    are forbidden. In a constrained request, tokens that the grammar does not allow are forbidden. Logprobs are the
    log-softmax of the logits after this step, before temperature and filters.
 4. Temperature. Below 1e-5 the sequence is greedy: the token with the largest logit after step 3 is chosen, and the
    lower id if two logits are equal.
 5. The filters, and the draw (`drawing`).

Shape letters: B rows (sequences), C candidates of a row, V vocabulary size.
"""

import math
from array import array
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.errors import InvalidArgumentError, NotFiniteError
from baton.modeling.device.sending import to_device
from baton.modeling.forward.drawing import (
    NO_TOKEN,
    Draws,
    RowDraw,
    choose_by_rows,
    choose_tokens,
    filters,
    is_greedy,
    kept_ids,
    largest_ids,
    largest_tokens,
)
from baton.modeling.kernels.triton.launch import compiles_for
from baton.sampling_params import SamplingParams
from baton.types import FinishReason, SampledToken, TokenLogprob


class TokenMasks(Protocol):
    """Token masks of a constrained output. They state which tokens the grammar allows next. Used only by the thread
    that samples."""

    def allowed(self) -> NDArray[np.float32]:
        """Return an upper bound for the logit of each token: infinity for an allowed token, minus infinity for a
        forbidden token. Tokens beyond the end of the array are forbidden. The caller must not change the array. Waits
        until the mask is computed. Raises InvalidArgumentError if the grammar does not allow the output."""
        ...

    def append(self, token_id: int) -> None:
        """Append the next token of the output. Does not wait for the mask of the token after it."""
        ...

    def drop(self, num_tokens: int) -> None:
        """Remove the latest `num_tokens` tokens. They must be drafts that were appended after the latest call of
        `settle`."""
        ...

    def foresee(self, token_ids: Sequence[int]) -> int:
        """Return the number of leading drafts in `token_ids` that the grammar allows as the next tokens, one after
        another. Blocks until the grammar has checked the drafts. The masks for the positions after the drafts are then
        computed in the background."""
        ...

    def settle(self, num_drafts: int) -> None:
        """Block until the masks are ready for `num_drafts` + 1 positions: the next token, and the token after each of
        the next `num_drafts` drafts. These drafts must have been passed to `foresee`, or appended and dropped. Tokens
        that were appended before this call can then no longer be dropped. Raises the errors of `allowed`."""
        ...


class SamplerState:
    """State from which a request's next token is sampled. It depends only on the request's history: after a retry, a
    state that is rebuilt from the history equals the original.

    Used by one sequence. Only `append` and `drop` change the state, and `drop` undoes `append`.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int] = (),
        eos_token_ids: Sequence[int] = (),
        *,
        masks: TokenMasks | None = None,
    ) -> None:
        """Create the state of a request with these prompt and output tokens. All ids must be in the vocabulary, except
        those of `stop_token_ids` and `logit_bias`.

        `masks`: masks of a constrained output, or None. The masks must already include `output_ids`. Later calls of
        `append` and `drop` are passed on to the masks.
        """
        self.params = params
        self.output_ids: list[int] = []
        self._stop_ids = frozenset(params.stop_token_ids) | frozenset(() if params.ignore_eos else eos_token_ids)
        self._stop_id_tensor = torch.tensor(sorted(self._stop_ids), dtype=torch.int64)
        self._bias_ids = torch.tensor(list(params.logit_bias), dtype=torch.int64)
        self._bias = torch.tensor(list(params.logit_bias.values()), dtype=torch.float32)
        self._seen = _SeenTokens(prompt_ids) if _penalizes(params) else None
        self._masks: TokenMasks | None = None
        for token_id in output_ids:
            self.append(token_id)
        self._masks = masks

    @property
    def position(self) -> int:
        """Return the output position of the next token, counted from 0."""
        return len(self.output_ids)

    def append(self, token_id: int) -> None:
        """Append a chosen token to the output. The property `position` is the output position that the token gets."""
        self.output_ids.append(token_id)
        if self._seen is not None:
            self._seen.count(token_id)
        if self._masks is not None:
            self._masks.append(token_id)

    def drop(self, num_tokens: int) -> None:
        """Remove the latest `num_tokens` tokens, as if they had never been appended."""
        for _ in range(num_tokens):
            token_id = self.output_ids.pop()
            if self._seen is not None:
                self._seen.uncount(token_id)
        if self._masks is not None:
            self._masks.drop(num_tokens)

    def foresee(self, token_ids: Sequence[int]) -> int:
        """Return the number of leading drafts in `token_ids` that the grammar allows as the next tokens. Without a
        grammar, all drafts are allowed."""
        return len(token_ids) if self._masks is None else self._masks.foresee(token_ids)

    def follow(self) -> bool:
        """Wait until the grammar's mask for the next token is ready. Return False if the grammar does not allow the
        output. `settle` then raises InvalidArgumentError with the reason. Without a grammar, return True
        immediately."""
        if self._masks is not None:
            try:
                self._masks.allowed()
            except InvalidArgumentError:
                return False
        return True

    def settle(self, num_drafts: int) -> None:
        """Wait until the grammar's masks are ready for `num_drafts` + 1 positions: the next token, and the token after
        each of the next `num_drafts` drafts. These drafts must have been passed to `foresee`, or appended and dropped.
        Raises InvalidArgumentError if the grammar does not allow the output."""
        if self._masks is not None:
            self._masks.settle(num_drafts)

    def finish_after_last(self) -> FinishReason | None:
        """Return the reason why the latest token ends the stream. None: the stream continues. Stop strings are not
        checked here."""
        if self.position > self.params.min_tokens and self.output_ids[-1] in self._stop_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if self.position >= self.params.max_tokens else None

    def row_draw(self, num_unread: int = 0) -> RowDraw | None:
        """Return the parameters with which a device can draw a token from unadjusted logits: the next one, or the one
        after `num_unread` tokens that were not appended yet. None: the device cannot, since the host must adjust the
        logits before the draw."""
        position = self.position + num_unread
        forbids = position < self.params.min_tokens and self._stop_ids
        is_adjusted = self._seen is not None or self._masks is not None or self.params.logit_bias or forbids
        return None if is_adjusted else RowDraw.of(self.params, position)

    def adjust(self, logits_V: Tensor) -> None:
        """Apply steps 1 to 3 of the module's docstring in place: penalties, logit bias and forbidden tokens. Ids in
        `stop_token_ids` and `logit_bias` that are outside the vocabulary are ignored."""
        if self._seen:
            self._penalize(logits_V, *self._seen.tensors(logits_V.device))
        num_tokens = logits_V.shape[0]
        if self.params.logit_bias:
            known = self._bias_ids < num_tokens
            ids = to_device(self._bias_ids[known], logits_V.device)
            logits_V[ids] += to_device(self._bias[known], logits_V.device)
        if self.position < self.params.min_tokens and self._stop_ids:
            ids = self._stop_id_tensor[self._stop_id_tensor < num_tokens]
            logits_V[to_device(ids, logits_V.device)] = -math.inf
        if self._masks is not None:
            _forbid(logits_V, self._masks.allowed())

    def _penalize(self, logits_V: Tensor, ids_C: Tensor, counts_C: Tensor) -> None:
        params, logits_C = self.params, logits_V[ids_C]
        if params.repetition_penalty != 1:
            divided_C, multiplied_C = logits_C / params.repetition_penalty, logits_C * params.repetition_penalty
            logits_C = torch.where(logits_C > 0, divided_C, multiplied_C)
        logits_C = logits_C - params.frequency_penalty * counts_C - params.presence_penalty * (counts_C > 0)
        logits_V[ids_C] = logits_C


def _forbid(logits_V: Tensor, most: NDArray[np.float32]) -> None:
    """Limit each logit to its upper bound in `most`, and forbid tokens beyond the end of `most`."""
    num_known = min(len(most), len(logits_V))
    most_K = to_device(torch.from_numpy(most[:num_known]), logits_V.device)
    torch.minimum(logits_V[:num_known], most_K, out=logits_V[:num_known])
    logits_V[num_known:] = -math.inf


def _penalizes(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0


class _SeenTokens:
    """Distinct tokens of prompt and output, and the number of times that each occurs in the output. Used for
    penalties."""

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        self._places = {token_id: place for place, token_id in enumerate(dict.fromkeys(prompt_ids))}
        self._ids = array("q", self._places)
        self._counts = array("f", bytes(4 * len(self._ids)))
        self._num_prompt = len(self._ids)

    def __len__(self) -> int:
        return len(self._ids)

    def count(self, token_id: int) -> None:
        """Add one occurrence of a token in the output."""
        place = self._places.setdefault(token_id, len(self._ids))
        if place == len(self._ids):
            self._ids.append(token_id)
            self._counts.append(0)
        self._counts[place] += 1

    def uncount(self, token_id: int) -> None:
        """Undo the latest call of `count`, which must have been for this token."""
        place = self._places[token_id]
        self._counts[place] -= 1
        if not self._counts[place] and place >= self._num_prompt:  # only the output had it
            assert place == len(self._ids) - 1
            del self._places[token_id], self._ids[place], self._counts[place]

    def tensors(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return copies of the token ids and of their counts in the output, `(ids_C, counts_C)`. At least one token
        must have been seen."""
        ids_C = torch.frombuffer(self._ids, dtype=torch.int64)
        counts_C = torch.frombuffer(self._counts, dtype=torch.float32)
        return to_device(ids_C.clone(), device), to_device(counts_C.clone(), device)


def sample(logits_BV: Tensor, states: Sequence[SamplerState]) -> list[SampledToken]:
    """Choose the next token of each sequence. `logits_BV` (fp32) is changed in place: penalties, logit bias and
    forbidden tokens are applied. `states` is not changed. If a logit of a sequence is NaN or plus infinity, its token
    is NO_TOKEN without logprobs.

    The token and logprobs of a sequence do not depend on the other sequences. A batch of greedy sequences costs one
    argmax.
    """
    assert logits_BV.dtype == torch.float32 and logits_BV.shape[0] == len(states), (logits_BV.dtype, logits_BV.shape)
    with torch.inference_mode():
        rows = zip(logits_BV, choose(logits_BV, states), states, strict=True)
        return [_report(logits_V, token_id, state.params.logprobs) for logits_V, token_id, state in rows]


def choose(logits_BV: Tensor, states: Sequence[SamplerState]) -> list[int]:
    """Choose the next token of each sequence, as `sample` does, but without logprobs. Return the token ids. The id is
    NO_TOKEN if a logit of the sequence is NaN or plus infinity. `logits_BV` (fp32) is changed in place: penalties,
    logit bias and forbidden tokens are applied."""
    for logits_V, state in zip(logits_BV, states, strict=True):
        state.adjust(logits_V)
    if not compiles_for(logits_BV.device, logits_BV.dtype):
        return choose_by_rows(logits_BV, [(state.params, state.position) for state in states])
    rows = [RowDraw.of(state.params, state.position) for state in states]
    kind = max(row.kind(logits_BV.shape[1]) for row in rows)
    token_ids: list[int] = choose_tokens(logits_BV, Draws.of(rows, logits_BV.device), kind).tolist()
    return token_ids


def score(logits_BV: Tensor, token_ids: Sequence[int], num_top: int) -> list[SampledToken]:
    """Return, for each row of logits, the token in `token_ids` with its logprob, and the `num_top` most likely tokens
    with theirs. Penalties and bias are not applied. Raises NotFiniteError if a logit is NaN or plus infinity."""
    assert logits_BV.dtype == torch.float32 and logits_BV.shape[0] == len(token_ids)
    if NO_TOKEN in largest_tokens(logits_BV).tolist():
        raise NotFiniteError("the logits of a prompt are not finite: see whether the model is damaged, or try again")
    return [_report(logits_V, token_id, num_top) for logits_V, token_id in zip(logits_BV, token_ids, strict=True)]


def report(logits_V: Tensor, token_id: int, state: SamplerState) -> SampledToken:
    """Return a chosen token, with the logprobs that its request asks for. `SamplerState.adjust` must have been applied
    to `logits_V`."""
    return _report(logits_V, token_id, state.params.logprobs)


def probabilities(logits_V: Tensor, params: SamplingParams) -> Tensor:
    """Return the probabilities `[V]` in float64 with which the next token is sampled. `SamplerState.adjust` must have
    been applied to `logits_V`."""
    found_V = torch.zeros(len(logits_V), dtype=torch.float64, device=logits_V.device)
    largest = float(logits_V.amax())
    if is_greedy(params) or not math.isfinite(largest):
        found_V[logits_V.argmax()] = 1.0
        return found_V
    scaled_V = (logits_V - largest) / params.temperature
    if not filters(params, len(logits_V)):
        return scaled_V.double().softmax(0)
    ids_C = kept_ids(scaled_V, params)
    found_V[ids_C] = scaled_V[ids_C].double().softmax(0)
    return found_V


def _report(logits_V: Tensor, token_id: int, num_top: int | None) -> SampledToken:
    if num_top is None or token_id == NO_TOKEN:
        return SampledToken(token_id)
    chosen_B = to_device(torch.tensor([token_id]), logits_V.device)
    [reported_2C] = log_probabilities(logits_V.unsqueeze(0), chosen_B, min(num_top, len(logits_V))).tolist()
    return token_of(token_id, reported_2C)


def log_probabilities(logits_BV: Tensor, token_ids_B: Tensor, num_top: int) -> Tensor:
    """Return, for each row of logits, the ids and the logprobs of a token and of the `num_top` most likely tokens,
    `[B, 2, 1 + num_top]`, float64. `token_ids_B`: the token of each row, int64, on the device of the logits. Does not
    wait for a GPU."""
    totals_B1 = logits_BV.double().logsumexp(1, keepdim=True)
    if logits_BV.is_cuda:
        top_BK = logits_BV.sort(descending=True, stable=True).indices[:, :num_top]
    else:
        top_BK = torch.stack([largest_ids(logits_V, num_top) for logits_V in logits_BV])
    ids_BC = torch.cat((token_ids_B.unsqueeze(1), top_BK), 1)
    return torch.stack((ids_BC.double(), logits_BV.gather(1, ids_BC).double() - totals_B1), 1)


def token_of(token_id: int, reported_2C: Sequence[Sequence[float]]) -> SampledToken:
    """Return a sampled token with the logprobs that `log_probabilities` returned for its row. They may be followed by
    those of more tokens than the request asked for, which the caller must cut off."""
    (_, *top_ids), (chosen, *top) = reported_2C
    chosen = 0.0 if math.isnan(chosen) else chosen  # every token is forbidden: this one had probability 1
    possible = sum(map(math.isfinite, top))  # forbidden tokens are left out of the most likely ones
    return SampledToken(token_id, chosen, tuple(map(TokenLogprob, map(int, top_ids[:possible]), top)))
