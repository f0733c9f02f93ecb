"""Compares a stream's tokens with those of an undisturbed run of the same schedule.

Forwards of other shapes differ in rounding, so a token may differ where the undisturbed run's decision was a close one:
the gap between the scores of the two tokens, from their logprobs and the seed's noise, is below MARGIN. After that
token, the two streams have different histories and are no longer compared. Such exceptions are counted. Pure.
"""

from collections.abc import Sequence

from baton.sampling_params import SamplingParams
from baton.types import SampledToken
from baton_lab.chaos.report import Answer, Outcome
from baton_lab.chaos.schedule import Ask

MARGIN = 1e-3
"""Largest gap of scores (logits divided by the temperature, fp32) that rounding may explain."""
_EXCEPTIONS_PER_TOKEN = 1e-3
"""Exceptions that are allowed for each token; one exception is always allowed."""


class CalmJudge:
    """Compares streams with the undisturbed run of one schedule. Implements Judge."""

    def __init__(self, calm: Sequence[Answer]) -> None:
        """Take the answers of the undisturbed run; all its requests were answered."""
        assert all(answer.outcome is Outcome.ANSWERED for answer in calm)
        self.num_exceptions = 0
        self.num_tokens = 0
        self._expected = {
            (answer.ask.number, choice.index): choice.tokens for answer in calm for choice in answer.output.choices
        }

    @property
    def has_too_many_exceptions(self) -> bool:
        """Return whether more tokens differ than rounding can explain."""
        return self.num_exceptions > max(1, _EXCEPTIONS_PER_TOKEN * self.num_tokens)

    def __call__(self, ask: Ask, choice: int, tokens: Sequence[SampledToken]) -> str:
        """Return what is wrong with the first tokens of a choice; empty when nothing is."""
        params = ask.params.of_choice(choice)
        expected = self._expected[ask.number, choice]
        for position, (found, due) in enumerate(zip(tokens, expected, strict=False)):
            self.num_tokens += 1
            if found.token_id == due.token_id:
                continue
            margin = margin_of(params, position, due, found)
            if margin >= MARGIN:
                return f"token {position} is {found.token_id} instead of {due.token_id}, by a margin of {margin:.4f}"
            self.num_exceptions += 1
            return ""
        return ""


def margin_of(params: SamplingParams, position: int, due: SampledToken, found: SampledToken) -> float:
    """Return how much better than `found` the undisturbed run's token `due` was, by the sampler's score when all tokens
    are kept. Both carry logprobs after the same history."""
    assert due.logprob is not None and found.logprob is not None
    if not params.temperature:
        return due.logprob - found.logprob
    import torch

    from baton.modeling.forward.drawing import gumbel_noise, noise_key

    ids = torch.tensor([due.token_id, found.token_id])
    noise = gumbel_noise([noise_key(params.seed, position)], ids)[0]
    return (due.logprob - found.logprob) / params.temperature + float(noise[0] - noise[1])
