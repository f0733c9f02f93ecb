"""The line that `baton generate` ends with: whether attention was exact, and whose it was if not."""

from dataclasses import replace

import pytest

from baton.results.completion import Choice, Completion, Usage
from baton.results.timings import DraftCounts, SpeculationTrace, Timings
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


def test_drafts_are_told_where_there_were_some() -> None:
    trace = SpeculationTrace(30, (DraftCounts("streaming", 20, 60, 48), DraftCounts("ngram", 2, 8, 1)))
    line = describe(replace(OUTPUT, timings=replace(TIMINGS, speculation=trace)))
    told = "30 steps, drafts accepted: streaming 48 of 60 (80%; 2.4 a round), ngram 1 of 8 (12%; 0.5 a round)"
    assert f"; {told}; " in line
    assert "drafts" not in describe(OUTPUT)
