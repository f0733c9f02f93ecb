"""Generation engines for tests: slots poisoned with NaN, recorded events, KV computed and pushed by the test, and
reference outputs."""

import asyncio
import concurrent.futures
import dataclasses
import itertools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from baton.modeling.device.copying import CopyTensor, copy_bytes
from baton.modeling.forward.decoder import Decoder, SequenceSpan
from baton.modeling.forward.sampling import SamplerState, sample
from baton.modeling.kv.buffers import BufferSpan, KvBuffer
from baton.modeling.prefix_store.store import PrefixStore
from baton.planning.speculation import MOST_DRAFTS
from baton.planning.step_cost import StepCost
from baton.planning.work_cost import WorkCost
from baton.process.clock import Clock
from baton.sampling_params import SamplingParams
from baton.transport.kv_sink import ReserveSpec
from baton.types import FinishReason, Lease, LeaseRef, RequestId, SampledToken, TokenEvent, TokenRange
from baton_lab.comparators.drafts import CHOOSING, configured
from generate_workers.config import CHOOSING_DRAFTS, AcceptanceName, EngineConfig
from generate_workers.engine.chunked_prefill import ChunkedPrefillPolicy
from generate_workers.engine.core import GenerationEngine
from generate_workers.engine.device_steps import make_device_steps
from generate_workers.engine.preemption import RunningRows
from generate_workers.engine.rows import GenerationRequest, StreamId
from generate_workers.engine.scheduling_policy import SchedulingPolicy
from generate_workers.engine.served_model import ServedModel
from generate_workers.engine.speculation import Speculation
from generate_workers.prefixes.answer_saving import AnswerSaver
from generate_workers.residency.port import DraftKeys, KvShape
from generate_workers.residency.sparse.draft_index import IndexedResidency
from generate_workers.slots.kv_memory import KvMemory, MemoryLimits
from generate_workers.slots.table import SlotTable
from generate_workers.speculation.draft_model import ModelProposer
from generate_workers.speculation.making import make_speculation
from generate_workers.speculation.speculator import Speculator
from tests.support.engines.infinigen import prepared
from tests.support.engines.slot_tables import UNLIMITED, Policy, ends_empty, make_residency, push_buffer
from tests.support.manual_clock import ManualClock
from tests.support.models.tiny_models import random_decoder
from tests.support.models.tiny_tokenizer import EOS_ID, letter_tokenizer

WAIT_S = 30.0
_LIKELY: dict[tuple[tuple[int, ...], float, int], list[int]] = {}
"""Earlier outputs of `reference_ids` for any model, by prompt, temperature and seed."""


class WatchedDecoder(Decoder):
    """Decoder that calls `before` with the tokens and spans of each forward pass."""

    def __init__(self, decoder: Decoder, before: Callable[[Any, Sequence[SequenceSpan]], None]) -> None:
        super().__init__(decoder.config, decoder.weights, decoder.kernel)
        self._before = before

    def forward(
        self, token_ids: Sequence[int] | torch.Tensor, spans: Sequence[SequenceSpan], *args: Any, **options: Any
    ) -> torch.Tensor:
        self._before(token_ids, spans)
        return super().forward(token_ids, spans, *args, **options)


class Collector:
    """Records a stream's events in a list, and sets an event at the end of its last choice."""

    def __init__(self, on_end: Callable[[], None] = lambda: None, num_choices: int = 1) -> None:
        self.events: list[TokenEvent] = []
        self.ended = threading.Event()
        self.num_after_end = 0
        self._on_end = on_end
        self._num_choices = num_choices

    def __call__(self, event: TokenEvent) -> None:
        self.num_after_end += self.ended.is_set()
        self.events.append(event)
        if sum(each.finish is not None for each in self.events) == self._num_choices:
            self._on_end()
            self.ended.set()

    def choice(self, number: int) -> "Collector":
        """Return a collector with the events of a single choice."""
        part = Collector()
        for event in self.events:
            if event.choice == number:
                part(event)
        return part

    @property
    def tokens(self) -> list[SampledToken]:
        return [event.token for event in self.events if event.token is not None]

    @property
    def token_ids(self) -> list[int]:
        return [token.token_id for token in self.tokens]

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events)

    @property
    def finish(self) -> FinishReason | None:
        return self.events[-1].finish if self.events else None

    @property
    def error(self) -> str:
        return self.events[-1].error

    def check(self) -> None:
        """Check that each choice has exactly one terminal event, that it is the choice's last event, and that token
        indices have no gaps."""
        if self._num_choices > 1:
            for number in range(self._num_choices):
                self.choice(number).check()
            return
        assert [event.finish is not None for event in self.events] == [False] * (len(self.events) - 1) + [True]
        assert self.num_after_end == 0
        indices = [event.index for event in self.events if event.token is not None]
        assert indices == list(range(indices[0], indices[0] + len(indices))) if indices else True


@dataclass
class Harness:
    """Engine on a manual clock. The test runs its steps, or starts its thread."""

    decoder: Decoder
    slots: SlotTable
    engine: GenerationEngine
    clock: Clock
    saver: AnswerSaver | None = None
    streams: list[Collector] = dataclasses.field(default_factory=list)
    numbers: "itertools.count[int]" = dataclasses.field(default_factory=itertools.count)

    def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        output_ids: Sequence[int] = (),
        ref: LeaseRef | None = None,
        on_end: Callable[[], None] = lambda: None,
    ) -> tuple[StreamId, Collector]:
        """Submit a request. Its stream is checked at the end of the test."""
        collector = Collector(on_end, params.n)
        name = RequestId(f"r{next(self.numbers)}")
        request = GenerationRequest(name, tuple(prompt_ids), tuple(output_ids), params, ref)
        stream_id = self.engine.submit(request, collector)
        self.streams.append(collector)
        if params.structured_output is not None:
            concurrent.futures.wait([made.masks for made in self.engine._queue.streams() if made.masks is not None])
        return stream_id, collector

    def run(self, *collectors: Collector, max_steps: int = 2000) -> None:
        """Run steps until the given streams have ended. Default: all streams."""
        waiting = collectors or tuple(self.streams)
        for _ in range(max_steps):
            if all(collector.ended.is_set() for collector in waiting):
                return
            self.engine.step()
        raise AssertionError(f"streams have not ended after {max_steps} steps")

    def answer(self, prompt_ids: Sequence[int], params: SamplingParams, output_ids: Sequence[int] = ()) -> Collector:
        """Run a request with local prefill to its end, and return its events."""
        _, collector = self.submit(prompt_ids, params, output_ids)
        self.run(collector)
        return collector

    def reserve(self, num_tokens: int, capacity_tokens: int, ttl_s: float = 5.0, num_choices: int = 1) -> Lease:
        spec = ReserveSpec(RequestId("pushed"), 1, num_tokens, capacity_tokens, ttl_s, num_choices)
        return self.slots.reserve(spec)

    def push(self, ref: LeaseRef, history_ids: Sequence[int]) -> None:
        """Compute the KV of `history_ids` in a separate forward pass, and push it."""
        buffer, _ = prefilled(self.decoder, history_ids)
        push_buffer(self.slots, ref, buffer, buffer.tokens)

    def commit(self, ref: LeaseRef, *firsts: SampledToken) -> None:
        asyncio.run(self.slots.commit(ref, firsts))

    def push_and_commit(self, ref: LeaseRef, prompt_ids: Sequence[int], params: SamplingParams) -> SampledToken:
        """Push and commit a lease as a prefill group does. Return the first token of the first choice."""
        self.push(ref, prompt_ids)
        choices = [params.of_choice(choice) for choice in range(params.n)]
        firsts = [sampled_next(self.decoder, prompt_ids, (), each) for each in choices]
        self.commit(ref, *firsts)
        return firsts[0]


@contextmanager
def harness(
    *,
    decoder: Decoder | None = None,
    clock: Clock | None = None,
    num_slots: int = 4,
    max_slot_tokens: int = 128,
    max_batched_tokens: int = 16,
    max_waiting: int = 8,
    limits: MemoryLimits = UNLIMITED,
    growth_tokens: int = 256,
    step_budget_s: float = math.inf,
    policy: Policy = "device",
    copy: CopyTensor = copy_bytes,
    poison: bool = True,
    store: PrefixStore | None = None,
    scheduling_policy: SchedulingPolicy | None = None,
    speculation: str = "off",
    draft_tokens: int = 3,
    draft_keys: int = 16,
    acceptance: AcceptanceName = "coupled",
    cost: WorkCost | None = None,
    draft_model: Decoder | None = None,
    speculator: Callable[[SlotTable, Speculation | None], Speculation] | None = None,
    step_graphs: bool = True,
) -> Iterator[Harness]:
    """Create an engine. At the end, check that each stream had exactly one terminal event and that no resource is held.
    `speculator` creates the speculation from the engine's slots and its default speculation. `speculation`: name of a
    speculation of the product or of the comparison."""
    decoder, clock = decoder or eos_decoder(), clock or ManualClock(start_s=100.0)
    drafting = (draft_model or small_decoder()) if speculation == "model" else None
    lengths = num_slots, max_slot_tokens
    shape = _shape(decoder, lengths, speculation, draft_keys)
    policy = _with_partial_keys(policy, speculation, decoder)
    residency = make_residency(shape, policy, copy, poison=poison, device=decoder.device)
    slots = SlotTable(KvMemory(residency, shape, limits, growth_tokens), clock, endpoint="127.0.0.1:1")
    config = EngineConfig(
        *(*lengths, max_batched_tokens, max_waiting),
        step_budget_s=step_budget_s,
        speculation=configured(speculation),
        draft_tokens=draft_tokens,
        draft_keys=draft_keys,
        acceptance=acceptance,
        draft_model="another" if drafting else "",
        step_graphs=step_graphs,
    )
    saver = AnswerSaver(slots, store) if store is not None else None
    model = _served(decoder, drafting, cost)
    steps = make_device_steps(decoder, residency, config, clock)
    own = make_speculation(model, slots, config, name=speculation, choosing=CHOOSING, device_steps=steps)
    drafts: Speculation | None = own if speculator is None else speculator(slots, own)
    scheduling_policy = scheduling_policy or ChunkedPrefillPolicy.of(config, model)
    running = RunningRows(slots, scheduling_policy, drafts, None if saver is None else saver.give_up)
    engine = GenerationEngine(model, running, config, device_steps=steps)
    try:
        with ends_empty(slots):
            yield (made := Harness(decoder, slots, engine, clock, saver))
        check_streams(made.streams)
    finally:
        _end(engine, saver, decoder)
    _check_ended(engine)


def _served(decoder: Decoder, drafting: Decoder | None, cost: WorkCost | None) -> ServedModel:
    """Return the model with these costs of steps; None: those of the machine."""
    model = ServedModel(decoder, letter_tokenizer(), drafting)
    if cost is not None:
        vars(model)["step_cost"] = StepCost(cost)
    return model


def _shape(decoder: Decoder, lengths: tuple[int, int], speculation: str, draft_keys: int) -> KvShape:
    drafts = None if speculation in ("off", "ngram", "model") else DraftKeys.of(draft_keys, MOST_DRAFTS)
    return KvShape(decoder.layout, decoder.config.windows, *lengths, drafts, configured(speculation) in CHOOSING_DRAFTS)


def _end(engine: GenerationEngine, saver: AnswerSaver | None, decoder: Decoder) -> None:
    engine.close()
    if saver is not None:
        saver.close()
    decoder.device.link.rest()


def check_streams(streams: Sequence[Collector]) -> None:
    """Check that each stream has all its events and exactly one terminal event."""
    for stream in streams:
        stream.check()


def small_decoder() -> Decoder:
    """Return a random decoder that serves as a draft model."""
    return random_decoder(num_heads=2, num_kv_heads=1, seed=9)


def _check_ended(engine: GenerationEngine) -> None:
    """Check that no thread of the engine runs and that no KV of a draft model is held."""
    assert "generate-engine" not in {thread.name for thread in threading.enumerate()}
    assert set(draft_kv_of(engine)) <= {0}, "rows that have ended hold KV of the draft model"


def draft_kv_of(engine: GenerationEngine) -> list[int]:
    """Return the bytes of KV that a draft model holds; empty without a draft model."""
    speculation = engine._speculation
    sources = speculation._sources.values() if isinstance(speculation, Speculator) else ()
    return [source.proposer.num_bytes for source in sources if isinstance(source.proposer, ModelProposer)]


def _with_partial_keys(policy: Policy, speculation: str, decoder: Decoder) -> Policy:
    """Return the policy, extended by partial keys if the speculation selects keys by them."""
    if (policy, speculation) != ("device", "infinigen"):
        return policy
    return partial(IndexedResidency, prepared=prepared(decoder=decoder))


def eos_decoder(seed: int = 0) -> Decoder:
    """Return a random decoder whose end-of-sequence token is that of the letter tokenizer."""
    decoder = random_decoder(seed=seed)
    decoder.config = dataclasses.replace(decoder.config, eos_token_ids=(EOS_ID,))
    return decoder


@torch.inference_mode()
def prefilled(decoder: Decoder, token_ids: Sequence[int]) -> tuple[KvBuffer, torch.Tensor]:
    """Return `(KV of all tokens, logits_TV)`, computed in one forward pass."""
    tokens = TokenRange(0, len(token_ids))
    with torch.inference_mode(False):
        buffer = decoder.device.buffer(decoder.layout, tokens)
    hidden_TD = decoder.forward(list(token_ids), [BufferSpan(buffer, tokens)])
    return buffer, decoder.logits(hidden_TD)


def sampled_next(
    decoder: Decoder, prompt_ids: Sequence[int], output_ids: Sequence[int], params: SamplingParams
) -> SampledToken:
    """Return the next token after a history, computed in one forward pass of the whole history."""
    _, logits_TV = prefilled(decoder, [*prompt_ids, *output_ids])
    return _sampled(decoder, logits_TV[-1], prompt_ids, output_ids, params)


def reference_ids(decoder: Decoder, prompt_ids: Sequence[int], params: SamplingParams) -> list[int]:
    """Return the expected output of a request. Each token is computed by a forward pass of all tokens, without cached
    KV, batch or engine. If the output of an equal request is known, a single forward pass verifies it."""
    key = (tuple(prompt_ids), params.temperature, params.seed)
    likely = _LIKELY.get(key, [])[: params.max_tokens - 1]
    output_ids: list[int] = []

    def is_complete() -> bool:
        is_end = not params.ignore_eos and output_ids[-1:] != [] and output_ids[-1] in decoder.config.eos_token_ids
        return is_end or len(output_ids) == params.max_tokens

    _, logits_TV = prefilled(decoder, [*prompt_ids, *likely])
    for logits_V in logits_TV[len(prompt_ids) - 1 :]:
        if is_complete() or output_ids != likely[: len(output_ids)]:
            break
        output_ids.append(_sampled(decoder, logits_V, prompt_ids, output_ids, params).token_id)
    while not is_complete():
        output_ids.append(sampled_next(decoder, prompt_ids, output_ids, params).token_id)
    if len(output_ids) > len(likely):
        _LIKELY[key] = list(output_ids)
    return output_ids


def _sampled(
    decoder: Decoder,
    logits_V: torch.Tensor,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    params: SamplingParams,
) -> SampledToken:
    state = SamplerState(params, prompt_ids, output_ids, decoder.config.eos_token_ids)
    return sample(logits_V[None].clone(), [state])[0]


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    """Return `length` token ids that are letters."""
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return tuple(torch.randint(0, 95, (length,), generator=generator).tolist())
