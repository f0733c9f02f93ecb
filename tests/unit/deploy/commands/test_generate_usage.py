"""The line that `baton generate` ends with: whether attention was exact, and whose it was if not."""

from dataclasses import replace

import pytest

from baton.results import Choice, Completion, Timings, Usage
from baton.types import FinishReason
from deploy.commands.generate import describe

TIMINGS = Timings(0, 0, 0, 0, 0)
OUTPUT = Completion(
    request_id="r",
    choices=(Choice(0, "a", (), FinishReason.LENGTH),),
    prompt=(),
    model="m",
    seed=7,
    exact=True,
    num_prompt_tokens=3,
    usage=Usage(3, 0, 1),
    timings=TIMINGS,
    num_resumes=0,
)


@pytest.mark.parametrize(
    ("exact", "policy", "told"),
    [
        (False, "infinigen", "; approximate attention (residency infinigen); "),
        (False, "", "; approximate attention; "),
        (None, "", ""),
        (True, "device", ""),
    ],
)
def test_approximate_attention_is_told(exact: bool | None, policy: str, told: str) -> None:
    line = describe(replace(OUTPUT, exact=exact, timings=replace(TIMINGS, residency=policy)))
    assert told in line
    assert bool(told) == ("approximate" in line)
