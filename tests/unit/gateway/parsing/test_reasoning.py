"""Reasoning and answer, told apart wherever the text is cut."""

import pytest

from gateway.chat_answers import Gathered
from gateway.parsing.output import OutputRules

CASES = [
    ("<think>\nHm, </thin\n</think>\n\nYes.", False, "Hm, </thin", "Yes."),
    ("\n<think>Hm</think>Yes\n", False, "Hm", "Yes\n"),
    ("Hm\n</think>\nYes", True, "Hm", "Yes"),
    ("<think>cut of", False, "cut of", ""),
    (" <thin air> \n", False, "", " <thin air> \n"),
    ("Yes <think>no</think>", False, "", "Yes <think>no</think>"),
    ("<think></think>Yes", False, "", "Yes"),
]


@pytest.mark.parametrize(("text", "is_open", "reasoning", "answer"), CASES)
def test_reasoning_is_told_from_the_answer(text: str, is_open: bool, reasoning: str, answer: str) -> None:
    for length in (1, 2, 3, 5, len(text)):
        parser, found = OutputRules(has_reasoning=True, is_reasoning_open=is_open).parser(), Gathered()
        for start in range(0, len(text), length):
            for piece in parser.push(text[start : start + length]):
                found.add(piece)
        for piece in parser.end():
            found.add(piece)
        assert (found.reasoning, found.text) == (reasoning, answer)
