"""Measures the quality of a residency policy: the model reads natural text in generation steps, and the policy provides
the KV.

Each sequence is a passage: a context, and the text that follows it in the original. Full attention computes the
context's KV, which is copied into the policy's memory. Every policy thus starts with the same KV. The text after the
context is fed one token per step, with all sequences in one batch. Each step returns the likelihood of the true next
token, and the token that the model would have chosen. The true token is always fed (teacher forcing), so that every
policy gets the same input. Functions run on the calling thread and are deterministic.

Shape suffixes: B sequences, M steps, V vocabulary, D hidden.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from rich.console import Console
from torch import Tensor

from baton.errors import ConfigError
from baton.modeling.forward.decoder import Decoder
from baton.modeling.kv.buffers import OUT_OF_MEMORY, BufferSpan, KvBuffer
from baton.types import SlotId, TokenRange
from deploy.options.screen import progress
from deploy.tuning.selection.metrics import PicksMeter
from generate_workers.residency.port import KvBytes, KvShape, Residency, RowKv

_CHUNK_TOKENS = 1024
"""Maximum number of context tokens that are prefilled in one call."""
_UNTIMED_STEPS = 3
"""Number of steps at the beginning of a run that are not timed, because they touch memory for the first time and are
slower."""


@dataclass(frozen=True)
class Passage:
    """Consecutive tokens of a text: a context, and the tokens that follow it."""

    token_ids: tuple[int, ...]
    num_context: int
    """Number of tokens of the context, which is prefilled. Each later token of the passage, except the last one, is fed
    in a step of its own. The step predicts the token that follows the fed token."""

    def __post_init__(self) -> None:
        assert self.num_context >= 1, "a row needs a context"
        assert self.num_steps >= 1, "a passage of one step has two tokens behind its context"

    @property
    def num_steps(self) -> int:
        """Number of steps of the passage. Each step feeds one token after the context, and predicts the token that
        follows the fed token. No step predicts the first token after the context."""
        return len(self.token_ids) - self.num_context - 1


@dataclass(frozen=True)
class Context:
    """Passage, with the KV of its context."""

    passage: Passage
    kv: KvBuffer
    """KV of at least the context's tokens, computed with full attention."""


@dataclass(frozen=True)
class StepScore:
    """Result of one step: its predictions of the next tokens, its duration, and the bytes that it read."""

    losses_B: Tensor
    """Negative log likelihoods (natural logarithm) of the true next tokens, in float64."""
    choices_B: Tensor
    """The token that the step predicts as most likely, for each sequence."""
    duration_s: float
    """Duration of the step in seconds. It includes the decoder, the policy, the logits and the choice of tokens."""
    num_kv_bytes: int
    """Bytes of KV that attention read, as counted by the policy."""
    num_link_bytes: int
    """Bytes copied between host memory and device memory, as counted by the policy."""
    num_full_bytes: int
    """Bytes of KV that attention to all keys would have read."""


@dataclass(frozen=True)
class Reading:
    """Combined result of all steps in which one policy read the passages."""

    losses_BM: Tensor
    """Negative log likelihoods (natural logarithm) of the true next tokens, in float64."""
    choices_BM: Tensor
    step_s: float
    """Median duration of a step in seconds. The first steps are not counted, and neither are steps in which attention
    weights were measured."""
    num_kv_bytes: int
    """Total number of bytes of KV that attention read in all steps. `num_link_bytes` and `num_full_bytes` are also
    totals of all steps."""
    num_link_bytes: int
    num_full_bytes: int
    held: KvBytes
    """KV memory of all sequences after the last step."""
    picked_share: float | None
    """Mean fraction of a sequence's keys to which its kv heads attended. Only layers in which the policy selects keys
    count. None if there are no such layers."""
    mass: float | None
    """Mean fraction of full attention's softmax weight that belongs to the keys attended to. None if it was not
    measured."""


def prefill(decoder: Decoder, token_ids: Sequence[int], done: Callable[[int], None] | None = None) -> KvBuffer:
    """Compute the KV of `token_ids` with full attention, in chunks. `done` is called with the number of tokens of each
    chunk. Raises one of the exceptions in OUT_OF_MEMORY if memory cannot be allocated."""
    kv = decoder.device.buffer(decoder.layout, TokenRange(0, len(token_ids)))
    with torch.inference_mode():
        for chunk in kv.tokens.split(_CHUNK_TOKENS):
            decoder.forward(token_ids[chunk.start : chunk.end], [BufferSpan(kv, chunk)])
            if done is not None:
                done(len(chunk))
    return kv


def prefill_contexts(decoder: Decoder, passages: Sequence[Passage], console: Console) -> list[Context]:
    """Prefill the contexts of all passages, and show a progress bar. Raises ConfigError if there is not enough memory
    for them."""
    num_tokens = sum(passage.num_context for passage in passages)
    try:
        with progress(console, f"prefill of {num_tokens} tokens", num_tokens) as done:
            return [Context(each, prefill(decoder, each.token_ids[: each.num_context], done)) for each in passages]
    except OUT_OF_MEMORY as error:
        remedy = "use fewer --rows, or a shorter --context"
        raise ConfigError(f"memory for {len(passages)} passages cannot be allocated ({error}): {remedy}") from error


def shape_for(decoder: Decoder, passages: Sequence[Passage]) -> KvShape:
    """Return the sizes that a policy needs to hold one sequence for each passage."""
    longest = max(len(passage.token_ids) for passage in passages)
    return KvShape(decoder.layout, decoder.config.windows, len(passages), longest)


class PassageRows:
    """Sequences, one per passage, that are fed one token of the passage per step while a policy provides the KV. Made
    with `opened`."""

    def __init__(
        self, decoder: Decoder, residency: Residency, passages: Sequence[Passage], rows: Sequence[RowKv]
    ) -> None:
        self._decoder = decoder
        self._residency = residency
        self._passages = passages
        self._rows = rows
        self._shape = shape_for(decoder, passages)
        self._num_steps = 0

    @classmethod
    @contextmanager
    def opened(cls, decoder: Decoder, residency: Residency, contexts: Sequence[Context]) -> Iterator["PassageRows"]:
        """Add one sequence for each context to the policy `residency`, and copy the context's KV to this sequence.
        Yield the sequences, and release them when the `with` block ends. The policy must not hold other sequences."""
        with ExitStack() as claims:
            rows: list[RowKv] = []
            for slot, context in enumerate(contexts):
                tokens = TokenRange(0, context.passage.num_context)
                row = residency.open(SlotId(slot), len(tokens), len(context.passage.token_ids))
                claims.callback(row.release)
                for layer in range(decoder.layout.num_layers):
                    row.write(layer, tokens, context.kv.export(layer, tokens)).result()
                rows.append(row)
            yield cls(decoder, residency, [context.passage for context in contexts], rows)

    @property
    def num_steps_left(self) -> int:
        """Number of steps until the shortest passage ends."""
        return min(passage.num_steps for passage in self._passages) - self._num_steps

    @property
    def held(self) -> KvBytes:
        """KV memory that all sequences use now."""
        return sum((row.num_bytes for row in self._rows), KvBytes())

    @torch.inference_mode()
    def step(self, meter: PicksMeter | None = None) -> StepScore:
        """Run one step, in which every sequence gets its next token of the text. `meter` records the keys that the
        policy selects. None: they are not recorded."""
        assert self.num_steps_left, "a passage has ended"
        places = [passage.num_context + self._num_steps for passage in self._passages]
        spans = [(SlotId(slot), TokenRange(at, at + 1)) for slot, at in enumerate(places)]
        link_bytes = self._residency.num_link_bytes
        start_s = time.perf_counter()
        with self._residency.step(spans) as step:
            turns = meter.watch(step) if meter else step.turns
            hidden_BD = self._decoder.forward(self._tokens(places), step.spans, turns)
            num_kv_bytes = step.num_bytes_read
        logits_BV = self._decoder.logits(hidden_BD)
        choices_B = logits_BV.argmax(-1)
        duration_s = time.perf_counter() - start_s
        self._num_steps += 1
        true_B = torch.tensor(self._tokens([at + 1 for at in places]), device=logits_BV.device)
        return StepScore(
            losses_B=torch.nn.functional.cross_entropy(logits_BV.double(), true_B, reduction="none").cpu(),
            choices_B=choices_B.cpu(),
            duration_s=duration_s,
            num_kv_bytes=num_kv_bytes,
            num_link_bytes=self._residency.num_link_bytes - link_bytes,
            num_full_bytes=self._shape.bytes_read(tokens for _, tokens in spans),
        )

    def _tokens(self, places: Sequence[int]) -> list[int]:
        return [passage.token_ids[at] for passage, at in zip(self._passages, places, strict=True)]


def read(rows: PassageRows, mass_every: int = 0, done: Callable[[], None] | None = None) -> Reading:
    """Run steps until the shortest passage ends, and return their combined result. `done` is called after each step.
    Every `mass_every` steps, the selected keys' share of full attention's softmax weight is measured, which is slow. If
    `mass_every` is 0, it is never measured."""
    meter, scores, times = PicksMeter(), [], []
    for number in range(rows.num_steps_left):
        meter.weighs = bool(mass_every) and number % mass_every == 0
        scores.append(rows.step(meter))
        if number >= _UNTIMED_STEPS and not meter.weighs:
            times.append(scores[-1].duration_s)
        if done is not None:
            done()
    return Reading(
        losses_BM=torch.stack([score.losses_B for score in scores], 1),
        choices_BM=torch.stack([score.choices_B for score in scores], 1),
        step_s=statistics.median(times or [score.duration_s for score in scores]),
        num_kv_bytes=sum(score.num_kv_bytes for score in scores),
        num_link_bytes=sum(score.num_link_bytes for score in scores),
        num_full_bytes=sum(score.num_full_bytes for score in scores),
        held=rows.held,
        picked_share=meter.picked_share,
        mass=meter.mass,
    )
