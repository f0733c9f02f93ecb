"""Speculative sampling: a drafted token is accepted, or another one is drawn, so that the token is distributed as p.

A draft x from q is accepted with probability min(1, p(x) / q(x)). Otherwise the token is drawn in proportion to
max(p - q, 0) (Leviathan, Kalman and Matias, 2023; Chen et al., 2023). p and q are after temperature, filters,
penalties and bias. No rule accepts more drafts. But the token depends on the draft, so that a request's text depends on
the drafts even with a fixed seed.

V vocabulary.
"""

from torch import Tensor

from baton.modeling.forward.drawing import NO_TOKEN, draw, largest_tokens, noise_key, uniform
from baton.modeling.forward.sampling import SamplerState, probabilities, report
from baton.types import SampledToken

_ACCEPT = 0xACCE97
_REDRAW = 0x5EC02D
"""Constants that make the noise of the two decisions about a draft differ from each other and from sampling."""


def verify_draft(
    logits_V: Tensor, state: SamplerState, draft_id: int, drafted_V: Tensor | None
) -> tuple[SampledToken, bool]:
    """Return a row's next token, and whether it is the accepted draft. `drafted_V`: the distribution that the draft was
    drawn from. None: the draft had probability 1. `logits_V` (fp32) are adjusted in place. The token is NO_TOKEN if one
    of them is NaN or infinity."""
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
