"""Texts of `baton evaluate` with a fact in the first half of the context, and a question about it at the end.

The facts are random, with a fixed seed. The rest of the context comes from the files of `--text`.
"""

import random
from dataclasses import dataclass
from functools import cached_property

from baton.errors import InvalidArgumentError
from deploy.tuning.selection.passages import Passage
from deploy.tuning.selection.texts import Texts, first_tokens

_SEED = 0
_TOLD = "\n\nThe password of {name} is {secret}.\n\n"
_ASKED = "\n\nThe password of {name} is"
_ANSWER = " {secret}"
_SYLLABLES = ("bar", "dex", "fim", "gor", "lun", "mir", "pol", "quin", "rax", "tov", "vel", "zan")
_SECRETS = (
    "purple", "violin", "granite", "lobster", "copper", "seventy", "Norway", "Tuesday", "pepper", "diamond", "tiger",
    "winter", "helmet", "pumpkin", "silver", "banana",
)  # fmt: skip


@dataclass(frozen=True)
class Needle:
    """Passage with a fact (a password) in its context. The passage ends with a question about the fact, and the
    answer."""

    passage: Passage
    num_answer: int
    """Number of tokens of the answer, which are the last tokens of the passage. A model can predict them only from the
    fact."""


class NeedleTexts(Texts):
    """Texts whose passages can contain facts and questions about them."""

    def needles(self, num_context: int, num_steps: int) -> list[Needle]:
        """Return a passage for each sequence. Its context has a fact in the first half, at a different position in each
        sequence. The context is followed by at least `num_steps` tokens of the text, then the question and the answer.
        Raises InvalidArgumentError if the text is too short for the passages, or if `num_context` tokens are too few
        for a fact."""
        facts = _facts(len(self._parts))
        forms = [[self._bare(form.format(**fact)) for form in (_TOLD, _ASKED, _ANSWER)] for fact in facts]
        longest = max(len(asked) + len(answer) for _, asked, answer in forms)
        needles = []
        for row, (part, (told, asked, answer)) in enumerate(zip(self._parts, forms, strict=True)):
            depth = num_context * (row + 1) // (2 * (len(forms) + 1))
            if depth + len(told) > num_context:
                raise InvalidArgumentError(f"--context {num_context} has no room for a fact: use more tokens")
            num_behind = num_steps + 1 + longest - len(asked) - len(answer)
            text = first_tokens(*part, num_context - len(told) + num_behind)
            ids = (*text[:depth], *told, *text[depth:], *asked, *answer)
            needles.append(Needle(Passage(ids, num_context), len(answer)))
        return needles

    def _bare(self, text: str) -> list[int]:
        """Return the tokens of a text that is inserted into another one, without the special tokens that the tokenizer
        adds at the start of a text."""
        return self._tokenizer.encode(text)[self._num_added :]

    @cached_property
    def _num_added(self) -> int:
        return len(self._tokenizer.encode(""))


def _facts(num_facts: int) -> list[dict[str, str]]:
    """Return invented names that occur in no text, each with a secret."""
    rng = random.Random(_SEED)
    names = ["".join(rng.sample(_SYLLABLES, 3)).capitalize() for _ in range(num_facts)]
    return [{"name": name, "secret": rng.choice(_SECRETS)} for name in names]
