"""Generator of a load's conversations: the text of each user message, and the length of its answer. Does no I/O."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count

import numpy as np

from baton_lab.bench.lengths import Mix
from baton_lab.bench.passages import Passages
from baton_lab.traffic.traces.trace import Trace

_ROOM = 0.9
"""Fraction of a model's context length that prompts and answers may fill. The margin is needed because token counts are
estimated from the text."""


@dataclass(frozen=True)
class Turn:
    """One message of a user, and the maximum length of its answer."""

    text: str
    max_tokens: int
    """Maximum number of output tokens of the answer."""
    think_s: float = 0.0
    """Seconds between the end of the previous answer and this turn."""


@dataclass(frozen=True)
class Conversation:
    """Conversation of one user with the model. Each turn is sent together with all earlier messages of the
    conversation."""

    number: int
    system: str
    """System prompt that all conversations of a load share; may be empty."""
    turns: tuple[Turn, ...]


@dataclass(frozen=True)
class Shape:
    """Parameters of the conversations of a load."""

    mix: Mix
    num_turns: int = 1
    system_tokens: int = 0
    think_s: float = 0.0
    """Mean seconds between an answer and the next turn, exponentially distributed."""
    num_prompts: int = 0
    """Number of distinct conversations. After the last one, the conversations repeat. 0: all conversations differ."""
    context_tokens: int | None = None
    """Maximum number of tokens that the model accepts, prompt and output together; None if unknown."""

    @property
    def room_tokens(self) -> float:
        """Return the maximum number of tokens of a conversation. It is less than the model's context length, because
        token counts are estimated from the text."""
        return float("inf") if self.context_tokens is None else max(self.context_tokens * _ROOM, 2.0)


def conversations(passages: Passages, shape: Shape, seed: int) -> Iterator[Conversation]:
    """Yield conversations without end. The same passages and the same seed give the same conversations. Raises
    ConfigError if all passages of the text have been used."""
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
    """Yield each request of a trace, in order, as a conversation of one turn.

    A trace may give the ids of each prompt's blocks. Blocks with the same id get the same text within a load, so
    prompts share prefixes as they do in the trace. `load` is the load's index; different loads get different texts.
    Requests longer than the model's context length are shortened.
    """
    system = passages.take(shape.system_tokens) if shape.system_tokens else ""
    for number, (num_tokens, max_tokens) in enumerate(zip(trace.prompt_tokens, trace.output_tokens, strict=True)):
        blocks = trace.blocks[number] if trace.blocks else ()
        num_prompt, num_output = _fitted(int(num_tokens), int(max_tokens), shape.room_tokens - shape.system_tokens)
        pieces = _pieces(blocks, trace.block_tokens, num_prompt)
        text = " ".join(passages.of_block(load, *piece) for piece in pieces) or passages.take(num_prompt)
        yield Conversation(number, system, (Turn(text, num_output),))


def _turns(passages: Passages, shape: Shape, generator: np.random.Generator) -> Iterator[Turn]:
    """Yield the turns of one conversation: at least one, and as many as fit in the model's context."""
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
    """Return the numbers of prompt and output tokens, reduced so that their sum is at most `left`. Output tokens get at
    most half of `left`."""
    num_output = int(min(num_output, max(left / 2, 1)))
    return int(min(num_prompt, max(left - num_output, 1))), num_output


def _pieces(blocks: Sequence[int], block_tokens: int, num_tokens: int) -> list[tuple[int, int]]:
    """Return (block, number of tokens) for each block of a prompt. The last block may be shorter than
    `block_tokens`."""
    sizes = [min(block_tokens, num_tokens - at * block_tokens) for at in range(len(blocks))]
    return [(block, size) for block, size in zip(blocks, sizes, strict=True) if size > 0]
