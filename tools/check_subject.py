"""Checks that the subject of the last commit is an imperative sentence of at most 72 characters.

`python tools/check_subject.py [SUBJECT]` checks the given subject. Without an argument, it checks the last commit that
is not a merge. The check looks at words only: the first word must be a capitalised verb in its base form, not an
article, a plural noun or a participle. Outside a git repository, there is nothing to check.
"""

import subprocess
import sys

MAX_CHARS = 72
NO_VERBS = frozenset(
    "a all an and any as at both but by each every for from how if in into it its more most no nobody not of on one or"
    " some that the their there these they this those to two what when where which who why with without".split()
)
VERBS_IN_S = frozenset(
    ("address", "access", "bias", "bypass", "compress", "cross", "discuss", "express", "focus", "guess")
)
VERBS_IN_S |= frozenset(("harness", "pass", "press", "process", "progress", "suppress", "toss", "witness"))
VERBS_IN_ED = frozenset(
    ("embed", "exceed", "feed", "heed", "need", "proceed", "seed", "shed", "speed", "succeed", "wed")
)
VERBS_IN_ING = frozenset(("bring", "cling", "fling", "ping", "ring", "sing", "spring", "string", "swing", "wring"))


def main() -> int:
    """Check a commit's subject, and print the result. Return 1 if the subject is refused, else 0."""
    subject = sys.argv[1] if len(sys.argv) > 1 else _last_subject()
    reason = why_refused(subject) if subject else ""
    print(f"subject {subject!r}: {reason}" if reason else "subject: an imperative sentence" if subject else "no commit")
    return 1 if reason else 0


def why_refused(subject: str) -> str:
    """Return the reason why a commit's subject is refused. Return an empty string if the subject is accepted."""
    if len(subject) > MAX_CHARS:
        return f"{len(subject)} characters, at most {MAX_CHARS}"
    words = subject.split()
    if len(words) < 2:
        return "a word is not a sentence"
    first = words[0].rstrip(",:;")
    if not first[0].isupper() or not first.isalpha():
        return f"begins with {first!r}: begin with a capitalised verb"
    if subject.endswith("."):
        return "ends with a full stop"
    if ";" in subject:
        return "joins ideas by a semicolon: a commit is one idea"
    if not may_be_verb(first.lower()):
        return f"begins with {first!r}: begin with a verb in its base form, as in 'Refuse prompts by bytes'"
    return ""


def may_be_verb(word: str) -> bool:
    """Return True if a lower-case word can be a verb in its base form."""
    if word in NO_VERBS:
        return False
    if word.endswith("s"):
        return word in VERBS_IN_S
    if word.endswith("ed"):
        return word in VERBS_IN_ED
    return not word.endswith("ing") or word in VERBS_IN_ING


def _last_subject() -> str:
    """Return the last commit's subject; empty outside a git repository."""
    command = ["git", "log", "-1", "--no-merges", "--format=%s"]
    run = subprocess.run(command, text=True, capture_output=True, check=False)
    return run.stdout.strip() if run.returncode == 0 else ""


if __name__ == "__main__":
    sys.exit(main())
