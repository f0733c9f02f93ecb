"""Generation engines whose sequences continue natural texts. Their KV is real; it is prefilled once and used by all
engines.

Because of the natural texts and real KV, drafts are accepted at realistic rates. With random KV they would not be. Must
be used by one thread.
"""

import asyncio
import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from baton.modeling.forward.decoder import Decoder
from baton.modeling.kv.buffers import BufferSpan, KvBuffer
from baton.process.clock import SystemClock
from baton.sampling_params import SamplingParams
from baton.text.tokenizer import Tokenizer
from baton.transport.kv_sink import ReserveSpec
from baton.types import RequestId, SampledToken, SlotId, TokenEvent, TokenRange
from baton_lab.comparators.drafts import make_speculation
from generate_workers.config import EngineConfig
from generate_workers.engine.chunked_prefill import ChunkedPrefillPolicy
from generate_workers.engine.core import GenerationEngine
from generate_workers.engine.memory_limits import make_memory
from generate_workers.engine.preemption import RunningRows
from generate_workers.engine.rows import GenerationRequest
from generate_workers.engine.served_model import ServedModel
from generate_workers.engine.speculation import SpeculationStats
from generate_workers.residency.port import DraftKeys
from generate_workers.slots.table import SlotTable
from generate_workers.speculation.streaming_view import StreamingView

_TTL_S = 3600.0
_CHUNK = 512
"""Number of prompt tokens per forward pass of the prefill."""
NO_DRAFTS = SpeculationStats()


@dataclass(frozen=True)
class PrefilledText:
    """Prompt with its KV, and the token that follows the prompt."""

    token_ids: tuple[int, ...]
    kv: KvBuffer
    first: SampledToken

    @classmethod
    @torch.inference_mode()
    def of(cls, decoder: Decoder, token_ids: Sequence[int]) -> "PrefilledText":
        """Prefill a prompt, and sample the next token greedily. Return the prompt with its KV and this token."""
        with torch.inference_mode(False):
            kv = KvBuffer(decoder.layout, TokenRange(0, len(token_ids)))
        hidden_TD = torch.empty(0)
        for part in kv.tokens.split(_CHUNK):
            hidden_TD = decoder.forward(token_ids[part.start : part.end], [BufferSpan(kv, part)])
        first = int(decoder.logits(hidden_TD[-1:]).argmax())
        return cls(tuple(token_ids), kv, SampledToken(first))


@dataclass(frozen=True)
class Measured:
    """Rates measured over a number of steps."""

    rate: float
    """Tokens per second of all sequences together."""
    tokens_step: float
    """Mean number of tokens that a sequence generates per step."""
    accepted_share: float
    """Fraction of the drafts that were accepted. 0 if no drafts were made."""
    link_mb: float
    """Megabytes copied between host and device per generated token."""


class TextRows:
    """Generation engine with one running sequence for each text. Create with `running`."""

    def __init__(self, engine: GenerationEngine, decoder: Decoder, slots: SlotTable, lengths: Sequence[int]) -> None:
        self.engine = engine
        self._decoder = decoder
        self._residency = slots.memory.residency
        self._lengths = lengths
        self.num_tokens = 0
        """Number of tokens sampled so far, in all sequences together."""

    @classmethod
    @contextlib.contextmanager
    def running(
        cls,
        decoder: Decoder,
        folder: Path,
        texts: Sequence[PrefilledText],
        params: SamplingParams,
        config: EngineConfig,
        *,
        speculation: str,
    ) -> Iterator["TextRows"]:
        """Context manager. Create an engine with one sequence per text, and yield it. The KV of each text's prompt is
        copied to the sequence's slot. The engine is closed on exit. `speculation` is the name of the drafting method,
        as in `make_speculation`."""
        clock = SystemClock()
        slots = SlotTable(make_memory(decoder, config), clock, endpoint="none:0")
        model = ServedModel(decoder, Tokenizer.load(folder))
        drafting = make_speculation(speculation, model, slots, config)
        running = RunningRows(slots, ChunkedPrefillPolicy.of(config, model), drafting)
        engine = GenerationEngine(model, running, config)
        rows = cls(engine, decoder, slots, [len(text.token_ids) for text in texts])
        try:
            for number, text in enumerate(texts):
                name, length = RequestId(f"row-{number}"), len(text.token_ids)
                lease = slots.reserve(ReserveSpec(name, 1, length, length + params.max_tokens, _TTL_S))
                with slots.open_push(lease.ref) as target:
                    for layer in range(slots.layout.num_layers):
                        target.copy_in(layer, text.kv.tokens, text.kv.export(layer, text.kv.tokens))
                    target.drain()
                asyncio.run(slots.commit(lease.ref, [text.first]))
                engine.submit(GenerationRequest(name, text.token_ids, (), params, lease.ref), rows._count)
            yield rows
        finally:
            engine.close()

    @torch.inference_mode()
    def bare_ms(self, num_drafts: int, keys: DraftKeys | None = None) -> float:
        """Return the milliseconds of one forward pass with logits, without the engine. Each sequence feeds its last
        prompt token and `num_drafts` draft tokens. If `keys` is None, these tokens attend to all keys. Otherwise they
        attend only to the keys that `keys` describes, as in drafting. Overwrites the KV of the sequences."""
        spans = [(SlotId(slot), TokenRange(end - 1, end + num_drafts)) for slot, end in enumerate(self._lengths)]
        view = self._residency if keys is None else StreamingView(self._residency, keys)
        token_ids = [1] * sum(len(tokens) for _, tokens in spans)
        start_s = time.perf_counter()
        with view.step(spans) as step:
            hidden_TD = self._decoder.forward(token_ids, step.spans, step.turns, most_queries=1 + num_drafts)
        self._decoder.logits(hidden_TD)
        return (time.perf_counter() - start_s) * 1e3

    def measure(self, num_tokens: int) -> Measured:
        """Step the engine until at least `num_tokens` more tokens have been sampled. Return the rates."""
        before, start_s = self.num_tokens, time.perf_counter()
        first, link_bytes = self.engine.status(), self._residency.num_link_bytes
        with torch.inference_mode():
            while self.num_tokens - before < num_tokens:
                self.engine.step()
        seconds, last = time.perf_counter() - start_s, self.engine.status()
        num_tokens = self.num_tokens - before
        drafts = NO_DRAFTS if last.speculation is None else last.speculation
        drafts_before = NO_DRAFTS if first.speculation is None else first.speculation
        num_drafted = drafts.num_drafted - drafts_before.num_drafted
        return Measured(
            rate=num_tokens / seconds,
            tokens_step=num_tokens / (last.num_steps - first.num_steps) / len(self._lengths),
            accepted_share=(drafts.num_accepted - drafts_before.num_accepted) / max(num_drafted, 1),
            link_mb=(self._residency.num_link_bytes - link_bytes) / num_tokens / 1e6,
        )

    def _count(self, event: TokenEvent) -> None:
        self.num_tokens += event.token is not None
