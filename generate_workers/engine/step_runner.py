"""One step's tensor work: a ragged forward over all planned rows, then one sampling. On the engine's thread.

`engine.core` hands it plans of `batcher`; KV comes from the residency policy, the forward is
`modeling.forward.decoder`.

T tokens of all spans, D hidden.
"""

from collections.abc import Callable, Mapping
from dataclasses import is_dataclass

import torch
from torch import Tensor

from baton.ids import SlotId
from baton.types import SampledToken, TokenRange
from generate_workers.engine.batcher import StepPlan
from generate_workers.engine.rows import Row
from generate_workers.engine.status import StepStats
from generate_workers.residency.port import Residency
from modeling.forward.decoder import Decoder, DecoderWeights
from modeling.forward.linear import Linear, LinearByRows
from modeling.forward.sampling import sample, score

_SCORED_TOKENS = 64
"""Prompt tokens whose logits are made at once: each takes 4 bytes for every token of the vocabulary."""


class StepRunner:
    """Runs step plans over the rows' KV, wherever the residency policy keeps it."""

    def __init__(self, decoder: Decoder, residency: Residency) -> None:
        self._decoder = decoder
        self._residency = residency
        self._num_weight_bytes = bytes_per_step(decoder.weights)
        self._num_kv_bytes = 0
        """Bytes of KV that attention read in the last step."""
        self._num_link_bytes = 0
        """Bytes copied between host and device before the last step."""

    def stats(self, plan: StepPlan, duration_s: float) -> StepStats:
        """Return what the last step, which ran `plan`, read and took."""
        return StepStats(
            num_decode_rows=plan.decoding.num_rows,
            num_prefill_tokens=plan.num_prefill_tokens,
            duration_s=duration_s,
            num_kv_bytes=self._num_kv_bytes,
            num_weight_bytes=self._num_weight_bytes,
            num_link_bytes=self._residency.num_link_bytes - self._num_link_bytes,
        )

    @torch.inference_mode()
    def run(self, plan: StepPlan, rows: Mapping[SlotId, Row], sampled: list[Row]) -> list[SampledToken]:
        """Run one forward over the plan's spans, then sample once for the rows `sampled`, and return their tokens in
        that order. They are the plan's rows that reach their last token, each followed by its followers."""
        self._num_link_bytes = self._residency.num_link_bytes
        token_ids: list[int] = []
        starts: dict[SlotId, int] = {}
        last: list[int] = []
        for part in plan.spans:
            row = rows[part.slot]
            starts[part.slot] = len(token_ids)
            token_ids += row.token_ids[part.tokens.start : part.tokens.end]
            if part.samples:
                last += [len(token_ids) - 1] * (1 + len(row.followers))
        with self._residency.step([(part.slot, part.tokens) for part in plan.spans]) as step:
            hidden_TD = self._decoder.forward(token_ids, step.spans, step.turns)
            self._num_kv_bytes = step.num_bytes_read
        for part in plan.spans:
            self._score(rows[part.slot], part.tokens, hidden_TD[starts[part.slot] :])
        if not last:
            return []
        return sample(self._decoder.logits(hidden_TD[last]), [row.sampler for row in sampled])

    def _score(self, row: Row, tokens: TokenRange, hidden_TD: Tensor) -> None:
        """Score the prompt's tokens if the row asks for it; `hidden_TD` begins with the hidden states of `tokens`."""
        for part in row.unscored(tokens).split(_SCORED_TOKENS):
            rows = slice(part.start - tokens.start, part.end - tokens.start)
            num_top = row.sampler.params.prompt_logprobs
            assert num_top is not None
            successors = row.token_ids[part.start + 1 : part.end + 1]
            row.add_scores(score(self._decoder.logits(hidden_TD[rows]), successors, num_top))


def bytes_per_step(weights: DecoderWeights) -> int:
    """Return the bytes of the parameters that every step of few rows reads whole. Not counted are positions and an
    embedding that is not the head: such a step reads only some of their rows."""
    return sum(_bytes_by_part((weights.layers, weights.final_norm, weights.head), _bytes_read).values())


def weight_bytes(weights: DecoderWeights) -> int:
    """Return the bytes of all parameters, as they are kept."""
    return sum(_bytes_by_part(weights, lambda linear: linear.num_bytes).values())


def _bytes_read(linear: Linear) -> int:
    """Return the bytes that a linear layer reads for few rows: of a weight that is kept twice, one copy."""
    return linear.few.num_bytes if isinstance(linear, LinearByRows) else linear.num_bytes


def _bytes_by_part(part: object, bytes_of: Callable[[Linear], int]) -> dict[int, int]:
    """Return the bytes of each linear layer, by `bytes_of`, and of each other tensor within `part`, by object id. An
    object that is used twice, such as a tied embedding, counts once."""
    if isinstance(part, Linear):
        return {id(part): bytes_of(part)}
    if isinstance(part, Tensor):
        return {id(part): part.nbytes}
    if isinstance(part, tuple | list):
        children = list(part)
    else:
        attributes = getattr(part, "__dict__", {}).values()
        children = [each for each in attributes if is_dataclass(part) or isinstance(each, Tensor)]
    found: dict[int, int] = {}
    for child in children:
        found |= _bytes_by_part(child, bytes_of)
    return found
