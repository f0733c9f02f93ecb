"""Compares the tokens of a stream with those of a run of the same schedule without faults (the undisturbed run).

Forward passes with different batch shapes round differently. A token may therefore differ if the two candidates had
almost the same score in the undisturbed run. The sampler's scores of both tokens are computed from their logprobs and
the seed's noise, and must differ by less than MARGIN. Such a difference is tolerated and counted (`num_exceptions`).
After it, the two streams have different histories, so their later tokens are not compared. Does no I/O.
"""

from collections.abc import Sequence

from baton.sampling_params import SamplingParams
from baton.types import SampledToken
from baton_lab.chaos.report import Answer, Outcome
from baton_lab.chaos.schedule import Ask

MARGIN = 1e-3
"""Maximum difference of two tokens' scores that is attributed to rounding. A score is a logit divided by the
temperature, in fp32."""
_EXCEPTIONS_PER_TOKEN = 1e-3
"""Allowed number of differing tokens, as a fraction of all compared tokens. One differing token is always allowed."""


class CalmJudge:
    """Compares streams with the run of the same schedule without faults. Implements Judge."""

    def __init__(self, calm: Sequence[Answer]) -> None:
        """Create a judge from the answers of the run without faults. All of these answers must be complete."""
        assert all(answer.outcome is Outcome.ANSWERED for answer in calm)
        self.num_exceptions = 0
        self.num_tokens = 0
        self._expected = {
            (answer.ask.number, choice.index): choice.tokens for answer in calm for choice in answer.output.choices
        }

    @property
    def has_too_many_exceptions(self) -> bool:
        """Return True if the number of tolerated differences from the undisturbed run exceeds its limit. The limit is
        1, or `_EXCEPTIONS_PER_TOKEN` times the number of compared tokens if that is larger."""
        return self.num_exceptions > max(1, _EXCEPTIONS_PER_TOKEN * self.num_tokens)

    def __call__(self, ask: Ask, choice: int, tokens: Sequence[SampledToken]) -> str:
        """Return a description of the first wrong token of a choice; an empty string if the tokens are right."""
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
    """Return the sampler's score of the token of the undisturbed run (`due`), minus its score of the token that was
    received (`found`). The score is computed as if no token were excluded from sampling. Both tokens must have logprobs
    that were computed after the same preceding tokens."""
    assert due.logprob is not None and found.logprob is not None
    if not params.temperature:
        return due.logprob - found.logprob
    import torch

    from baton.modeling.forward.drawing import gumbel_noise, noise_key

    ids = torch.tensor([due.token_id, found.token_id])
    noise = gumbel_noise([noise_key(params.seed, position)], ids)[0]
    return (due.logprob - found.logprob) / params.temperature + float(noise[0] - noise[1])
