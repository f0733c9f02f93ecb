"""Reference tokens of a single process, and the comparison of a stream with them by the rule of DESIGN.md, section 7.

One forward pass over prompt and output gives the reference's choice at every position, given the stream's previous
tokens. A token may differ only if the reference's margin is below 1e-3. The margin is the difference between the
reference's best score and its score of the stream's token; when sampling, the seed's noise is added to scores. The
check fails if more than one token in a thousand differs; one token may always differ.
"""

from collections.abc import Sequence

import torch

from baton.modeling.forward.decoder import Decoder
from baton.modeling.forward.drawing import gumbel_noise, noise_key
from baton.modeling.forward.sampling import SamplerState, sample
from baton.modeling.kv.buffers import BufferSpan, KvBuffer
from baton.sampling_params import SamplingParams
from baton.types import TokenRange

MARGIN = 1e-3


def check_equal_tokens(
    decoder: Decoder, prompt_ids: Sequence[int], output_ids: Sequence[int], params: SamplingParams
) -> None:
    """Assert that `output_ids` are the reference's tokens. Prints the exceptions that the rule permits."""
    ids = [*prompt_ids, *output_ids]
    tokens = TokenRange(0, len(ids) - 1)
    with torch.inference_mode():
        hidden_TD = decoder.forward(ids[:-1], [BufferSpan(KvBuffer(decoder.layout, tokens), tokens)])
        logits_RV = decoder.logits(hidden_TD[len(prompt_ids) - 1 :])
    margins = []
    for index, token_id in enumerate(output_ids):
        state = SamplerState(params, prompt_ids, output_ids[:index], decoder.config.eos_token_ids)
        expected = sample(logits_RV[index : index + 1].clone(), [state])[0].token_id
        if expected != token_id:
            margins.append(_margin(logits_RV[index], state, expected, token_id))
    assert all(margin < MARGIN for margin in margins), f"tokens differ by margins {margins}"
    assert len(margins) <= max(1, len(output_ids) // 1000), f"{len(margins)} of {len(output_ids)} tokens differ"
    if margins:
        print(f"{len(margins)} of {len(output_ids)} tokens differ within the margin: {margins}")


def _margin(logits_V: torch.Tensor, state: SamplerState, expected: int, token_id: int) -> float:
    scores_V = logits_V.clone()
    state.adjust(scores_V)
    if state.params.temperature:
        key = noise_key(state.params.seed, state.position)
        scores_V = scores_V / state.params.temperature + gumbel_noise([key], torch.arange(len(scores_V)))[0]
    return float(scores_V[expected] - scores_V[token_id])
