"""Drafting by steps of a model. Each step drafts one token for each sequence, with the sequence's own sampler.

`self_drafts` and `draft_model` define how a step runs. A draft token is the token that the sequence would sample from
the step's logits, with its own seed and output position. The draft is accepted if the verifying step samples the same
token.

Shape suffixes: R sequences of a step, V vocabulary.
"""

from collections.abc import Callable, Sequence

from torch import Tensor

from baton.modeling.forward.drawing import NO_TOKEN
from baton.modeling.forward.sampling import choose, probabilities
from generate_workers.engine.rows import Row
from generate_workers.engine.verified import Draft
from generate_workers.speculation.port import DraftRequest

Going = Sequence[tuple[Row, Draft]]
"""Sequences for which tokens are being drafted, each with its draft so far."""
RunStep = Callable[[Going, int], Tensor]
"""Function that runs a draft step. Arguments: the sequences, each with its draft so far, and the number of tokens in
each draft, which is the same for all. Returns the fp32 logits `[R, V]` of the token after each draft. The caller may
change the logits."""


def draft_by_steps(draft_requests: Sequence[DraftRequest], run: RunStep, *, keeps: bool) -> list[Draft]:
    """Return a draft for each request, with the requested number of tokens, or fewer if a sequence cannot continue.
    `run`: function that runs a draft step. `keeps`: True if the distributions from which drafts were sampled must be
    kept.

    During the call, drafted tokens are added to the sequences' samplers. The samplers are restored when this function
    returns or raises.
    """
    drafts = [Draft([], [] if keeps else None) for _ in draft_requests]
    try:
        for index in range(max(request.num_drafts for request in draft_requests)):
            found = zip(draft_requests, drafts, strict=True)
            going = [(request.row, draft) for request, draft in found if request.num_drafts > index == len(draft)]
            if going:
                _extend(going, run(going, index))
    finally:
        for request, draft in zip(draft_requests, drafts, strict=True):
            request.row.sampler.drop(len(draft))
    return drafts


def _extend(going: Going, logits_RV: Tensor) -> None:
    """Add the next token to each draft. A draft ends if its sequence's token mask allows no further token, or if its
    logits give no token; verification reports the error."""
    able = [place for place, (row, _) in enumerate(going) if row.sampler.follow()]
    if len(able) < len(going):
        going, logits_RV = [going[place] for place in able], logits_RV[able]
    token_ids = choose(logits_RV, [row.sampler for row, _ in going])
    for (row, draft), token_id, logits_V in zip(going, token_ids, logits_RV, strict=True):
        if token_id == NO_TOKEN:
            continue
        draft.token_ids.append(token_id)
        if draft.drafted_V is not None:
            draft.drafted_V.append(probabilities(logits_V, row.sampler.params))
        row.sampler.append(token_id)
