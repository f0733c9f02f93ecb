"""Drafting by steps of a model: a token at a time for all rows, each by its row's own sampler.

`self_drafts` and `draft_model` say what a step runs. A draft is the token that its row would sample from the step's
logits, by the row's seed and output position, so that it is accepted wherever the model's own logits lead to the same.

R rows of a step, V vocabulary.
"""

from collections.abc import Callable, Sequence

from torch import Tensor

from generate_workers.engine.rows import Row
from generate_workers.engine.verified import Draft
from generate_workers.speculation.port import DraftWish
from modeling.forward.drawing import NO_TOKEN
from modeling.forward.sampling import choose, probabilities

Going = Sequence[tuple[Row, Draft]]
"""Rows that are drafted for, each with its draft so far."""
RunStep = Callable[[Going, int], Tensor]
"""Runs a draft step. Takes the rows, whose drafts hold as many tokens as the number says, and returns the logits `[R,
V]` in fp32 of what follows each row's draft; the caller may change them."""


def draft_by_steps(wishes: Sequence[DraftWish], run: RunStep, *, keeps: bool) -> list[Draft]:
    """Return as many drafts as wished for. `keeps`: whether drafts come with the distributions that they were drawn
    from. The rows' samplers know the drafts while `run` runs, and are as before when this returns or raises."""
    drafts = [Draft([], [] if keeps else None) for _ in wishes]
    try:
        for index in range(max(wish.num_drafts for wish in wishes)):
            found = zip(wishes, drafts, strict=True)
            going = [(wish.row, draft) for wish, draft in found if wish.num_drafts > index == len(draft)]
            if going:
                _extend(going, run(going, index))
    finally:
        for wish, draft in zip(wishes, drafts, strict=True):
            wish.row.sampler.drop(len(draft))
    return drafts


def _extend(going: Going, logits_RV: Tensor) -> None:
    """Add the next token to each draft, unless its row's output cannot be followed, or has no token: verification says
    so."""
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
