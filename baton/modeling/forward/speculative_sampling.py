"""Speculative sampling: a drafted token is accepted or replaced, so that the resulting token has the distribution p of
the model.

Let q be the distribution from which the draft x was drawn. Both p and q are taken after temperature, filters, penalties
and bias. The draft is accepted with probability min(1, p(x) / q(x)). Otherwise a token is drawn in proportion to max(p
- q, 0) (Leviathan, Kalman and Matias, 2023; Chen et al., 2023).

No other rule accepts more drafts. However, the token depends on the draft. The text of a request therefore depends on
the drafts, even with a fixed seed.

Shape letter: V vocabulary size.
"""

from torch import Tensor

from baton.modeling.forward.drawing import NO_TOKEN, draw, largest_tokens, noise_key, uniform
from baton.modeling.forward.sampling import SamplerState, probabilities, report
from baton.types import SampledToken

_ACCEPT = 0xACCE97
_REDRAW = 0x5EC02D
"""Constant that is mixed into the noise key for drawing a replacement of a rejected draft. The noise then differs from
that of sampling and of accepting (`_ACCEPT`)."""


def verify_draft(
    logits_V: Tensor, state: SamplerState, draft_id: int, drafted_V: Tensor | None
) -> tuple[SampledToken, bool]:
    """Return the next token of a sequence, and True if it is the accepted draft.

    `drafted_V`: distribution from which the draft was drawn. None: the draft had probability 1. `logits_V` (fp32) is
    changed in place by `SamplerState.adjust`. If a logit is NaN or plus infinity, the token is NO_TOKEN.
    """
    state.adjust(logits_V)
    if int(largest_tokens(logits_V)) == NO_TOKEN:
        return SampledToken(NO_TOKEN), False
    p_V = probabilities(logits_V, state.params)
    key = noise_key(state.params.seed, state.position)
    q = 1.0 if drafted_V is None else float(drafted_V[draft_id])
    if uniform(key ^ _ACCEPT) * q < float(p_V[draft_id]):
        return report(logits_V, draft_id, state), True
    if drafted_V is None:
        p_V[draft_id] = 0.0
    else:
        p_V = (p_V - drafted_V).clamp_(min=0)
    return report(logits_V, draw(p_V, key ^ _REDRAW), state), False
