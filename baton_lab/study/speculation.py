"""Speedup of speculative decoding, predicted by the roofline model: the curves of MagicDec (Sadhukhan et al., 2025),
figures 2 to 4.

T(B, K, q) is the duration of a step in which B sequences attend to K keys with q tokens each
(`baton_lab.study.roofline`). A round consists of g draft steps that attend to K keys each, and one step that verifies
the drafts with a context of S tokens. It takes

    g * T(B, K, 1) + T(B, S, g + 1)

and yields `baton.planning.work_cost.expected_tokens` tokens per sequence. A plain step takes T(B, S, 1) and yields
one token per sequence.

The predicted speedup is an upper bound, because selecting keys, sampling and launching steps are assumed to take no
time. In a server, rounds are planned with costs that are learnt from measured steps (`baton.planning.speculation`).
Used by `baton plan`. Does no I/O.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from baton.errors import ConfigError
from baton.limits import MAX_DRAFTS
from baton.planning.chips import Chip
from baton.planning.work_cost import expected_tokens
from baton_lab.study.roofline import ServedModel, step_time


@dataclass(frozen=True)
class Drafting:
    """Draft method, and the candidate rounds from which `best_round` chooses. A round consists of draft steps and one
    step that verifies the drafts. Each number of drafts in `numbers` is combined with each number of keys in
    `acceptances`."""

    acceptances: Mapping[int, float]
    """Probability that a draft is accepted, given that all drafts before it were accepted. The dictionary key is the
    number of keys that a draft step attends to."""
    numbers: Sequence[int] = range(MAX_DRAFTS + 1)
    """Candidates for the number of drafts per sequence. 0 means a plain step."""
    model: ServedModel | None = None
    """Separate draft model. None: the served model drafts for itself."""

    def __post_init__(self) -> None:
        if not self.acceptances or not self.numbers:
            raise ConfigError("drafting: no draft_keys or no numbers of drafts: give at least one of each")
        for keys, acceptance in self.acceptances.items():
            if keys < 1 or not 0 <= acceptance <= 1:
                raise ConfigError(
                    f"drafting: acceptance = {acceptance} with {keys} draft_keys is out of range: give 0 to 1, and at"
                    " least 1 key"
                )
        if min(self.numbers) < 0:
            raise ConfigError(f"drafting: {min(self.numbers)} drafts are out of range: give 0 or more")


@dataclass(frozen=True)
class DraftRound:
    """Predicted times of one round and of the plain step with which the round is compared. A round consists of draft
    steps for the sequences of a batch and one step that verifies their drafts."""

    num_drafts: int
    draft_keys: int
    plain_s: float
    """Duration in seconds of a plain step, without speculation."""
    draft_s: float
    """Duration in seconds of one draft step."""
    verify_s: float
    """Duration in seconds of the step that verifies the drafts."""
    num_tokens: float
    """Mean number of output tokens that the round yields for each sequence."""

    @property
    def round_s(self) -> float:
        """Duration in seconds of all draft steps and the verification step together."""
        return self.num_drafts * self.draft_s + self.verify_s

    @property
    def speedup(self) -> float:
        """Tokens per second of generation in rounds like this one, divided by the tokens per second of plain steps."""
        return self.num_tokens * self.plain_s / self.round_s


def best_round(
    model: ServedModel, chip: Chip, drafting: Drafting, *, batch: int, context: int, num_chips: int = 1
) -> DraftRound:
    """Return the round (draft steps and one verification step) with the largest speedup for `batch` sequences of
    `context` tokens each. If several rounds have the same speedup, return the one with the fewest drafts. If several of
    these have equally few drafts, return the one whose draft steps attend to the fewest keys."""
    target = partial(step_time, model, chip, batch=batch, context=context, num_chips=num_chips)
    plain_s = target().total_s
    verify_s = {num: target(num_queries=num + 1).total_s for num in sorted(drafting.numbers)}
    rounds = []
    for keys in sorted(drafting.acceptances):
        step = partial(step_time, drafting.model or model, chip, batch=batch, num_chips=num_chips)
        draft_s = step(context=min(keys, context)).total_s
        num_tokens = partial(expected_tokens, drafting.acceptances[keys])
        rounds += [DraftRound(num, keys, plain_s, draft_s, verify_s[num], num_tokens(num)) for num in verify_s]
    return max(rounds, key=lambda each: (each.speedup, -each.num_drafts, -each.draft_keys))


def pays_from(
    model: ServedModel, chip: Chip, drafting: Drafting, *, batch: int, longest: int, num_chips: int = 1
) -> int | None:
    """Return the smallest context length in tokens at which speculation yields more tokens per second than plain steps,
    for this batch size. The paper calls this length the inflection length. Return None if it is more than `longest`."""

    def pays(context: int) -> bool:
        found = best_round(model, chip, drafting, batch=batch, context=context, num_chips=num_chips)
        return found.num_drafts > 0 and found.speedup > 1

    found = 1 + bisect_left(range(1, longest + 1), True, key=pays)
    return found if found <= longest else None
