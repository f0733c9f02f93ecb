"""Makes the conversations of a load: the text of each turn, and the length of its answer. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count

import numpy as np

from baton_lab.bench.lengths import Mix
from baton_lab.bench.passages import Passages
from baton_lab.traffic.traces.trace import Trace

_ROOM = 0.9
"""Fraction of a model's context that prompts and answers may fill, because the token counts of texts are estimates."""


@dataclass(frozen=True)
class Turn:
    """One message of a user, and the limits of its answer."""

    text: str
    max_tokens: int
    """Output tokens of the answer."""
    think_s: float = 0.0
    """Seconds between the end of the answer before and this turn."""


@dataclass(frozen=True)
class Conversation:
    """Turns of one user. Each turn is sent with all earlier messages of the conversation."""

    number: int
    system: str
    """Text with which all conversations of a load begin; may be empty."""
    turns: tuple[Turn, ...]


@dataclass(frozen=True)
class Shape:
    """How conversations are made."""

    mix: Mix
    num_turns: int = 1
    system_tokens: int = 0
    think_s: float = 0.0
    """Mean seconds between an answer and the next turn, exponentially distributed."""
    num_prompts: int = 0
    """Number of conversations after which the same ones repeat; 0: all conversations differ."""
    context_tokens: int | None = None
    """Tokens of prompt and answer together that the model takes; None: unknown."""

    @property
    def room_tokens(self) -> float:
        """Return the maximum number of tokens of a conversation, with a margin for tokens counted differently."""
        return float("inf") if self.context_tokens is None else max(self.context_tokens * _ROOM, 2.0)


def conversations(passages: Passages, shape: Shape, seed: int) -> Iterator[Conversation]:
    """Yield conversations without end; the same for the same seed and passages. Raises ConfigError when the text of the
    passages has no new ones."""
    generator = np.random.default_rng(seed)
    system = passages.take(shape.system_tokens) if shape.system_tokens else ""
    made: list[Conversation] = []
    for number in count():
        if shape.num_prompts and number >= shape.num_prompts:
            yield replace(made[number % shape.num_prompts], number=number)
            continue
        conversation = Conversation(number, system, tuple(_turns(passages, shape, generator)))
        if shape.num_prompts:
            made.append(conversation)
        yield conversation


def replayed(passages: Passages, trace: Trace, shape: Shape, load: int) -> Iterator[Conversation]:
    """Yield the requests of a trace, in its order, as conversations of one turn. Where the trace names blocks, equal
    blocks of a load are equal texts, so that its prompts share prefixes as those of the trace do. Requests that exceed
    the model's context are cut."""
    system = passages.take(shape.system_tokens) if shape.system_tokens else ""
    for number, (num_tokens, max_tokens) in enumerate(zip(trace.prompt_tokens, trace.output_tokens, strict=True)):
        blocks = trace.blocks[number] if trace.blocks else ()
        num_prompt, num_output = _fitted(int(num_tokens), int(max_tokens), shape.room_tokens - shape.system_tokens)
        pieces = _pieces(blocks, trace.block_tokens, num_prompt)
        text = " ".join(passages.of_block(load, *piece) for piece in pieces) or passages.take(num_prompt)
        yield Conversation(number, system, (Turn(text, num_output),))


def _turns(passages: Passages, shape: Shape, generator: np.random.Generator) -> Iterator[Turn]:
    """Yield the turns of one conversation, as many as the model has room for, and at least one."""
    used = float(shape.system_tokens)
    for number in range(shape.num_turns):
        num_prompt, num_output = shape.mix.prompt.draw(generator), shape.mix.output.draw(generator)
        think_s = float(generator.exponential(shape.think_s)) if number and shape.think_s else 0.0
        left = shape.room_tokens - used
        if number and num_prompt + num_output > left:
            return
        num_prompt, num_output = _fitted(num_prompt, num_output, left)
        used += num_prompt + num_output
        yield Turn(passages.take(num_prompt), num_output, think_s)


def _fitted(num_prompt: int, num_output: int, left: float) -> tuple[int, int]:
    """Return the tokens of prompt and answer, cut so that their sum is at most `left`; answers get at most half."""
    num_output = int(min(num_output, max(left / 2, 1)))
    return int(min(num_prompt, max(left - num_output, 1))), num_output


def _pieces(blocks: Sequence[int], block_tokens: int, num_tokens: int) -> list[tuple[int, int]]:
    """Return the blocks of a prompt with the tokens of each, the last of which may have fewer."""
    sizes = [min(block_tokens, num_tokens - at * block_tokens) for at in range(len(blocks))]
    return [(block, size) for block, size in zip(blocks, sizes, strict=True) if size > 0]
