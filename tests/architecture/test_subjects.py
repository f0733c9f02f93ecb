"""A commit's subject is an imperative sentence about one idea, as far as a rule can tell."""

import pytest

from tools.check_subject import why_refused


@pytest.mark.parametrize(
    "subject",
    [
        "Refuse prompts by bytes before tokenizing",
        "Pass the cluster's secret to every worker",
        "Need no torch in the launcher",
        "Ping workers of both roles",
        "Give every package folders that import downward only",
    ],
)
def test_an_imperative_sentence_passes(subject: str) -> None:
    assert why_refused(subject) == ""


@pytest.mark.parametrize(
    ("subject", "reason"),
    [
        ("Ending a client's streams is no method of theirs", "begin with a verb"),
        ("Commands say that no worker answers", "begin with a verb"),
        ("Bounded reading of prompts", "begin with a verb"),
        ("A list of policies", "begin with a verb"),
        ("With one tenant nothing changes", "begin with a verb"),
        ("refuse long prompts", "capitalised"),
        ("x", "a word is not a sentence"),
        ("Refuse prompts; bound reading", "semicolon"),
        ("Refuse prompts.", "full stop"),
        ("Refuse " + "long " * 14, "characters, at most 72"),
    ],
)
def test_what_is_no_imperative_sentence_is_refused(subject: str, reason: str) -> None:
    assert reason in why_refused(subject)
