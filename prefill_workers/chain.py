"""One rank's part of a KV-Runahead chain: the forward pass over the rank's chunk, divided into turns.

Rank i owns the tokens [s, e) of the prompt. Per layer it

  1. projects its own KV rows into the job's buffer, pushes them to the slot (they are final, and are sent while the
     chain still runs), hands them to the pipeline, and attends to them: a causal square that needs no other rank's KV;
  2. waits for the earlier ranks' rows, attends densely to the cached prefix and to these rows, in place, merges with
     the result of 1 by log-sum-exp, and completes the layer.

A turn is step 2 of one layer and step 1 of the next: it ends where step 2 may have to wait. Between turns the engine
may serve other jobs. Within a turn it never waits. The dependencies are:

    rank 0   layer 0 ------> layer 1 ------> layer 2 ...         a rank needs, in layer l, only layer l of the rank
                |               |               |                before it: ranks run in step, one layer apart, and a
    rank 1      +--> layer 0 ---+--> layer 1 ---+--> layer 2     message's delay is paid once, not in every layer
                        |               |

In the last layer only the last token's hidden state is needed. All ranks except the last stop after projecting. The
last rank attends for one token only and completes the layer, and samples the request's next token for each choice.

No collective operation is called. Implements KV-Runahead (Cho, Rastegari, Naik, ICML 2024), section 4, with causal
squares instead of its dense rectangles. Called by `prefill_workers.engine`, on its thread.
"""

from collections.abc import Generator
from concurrent.futures import Future

from torch import Tensor

from baton.errors import NotFiniteError
from baton.modeling.forward.decoder import Decoder
from baton.modeling.forward.drawing import NO_TOKEN
from baton.modeling.forward.sampling import SamplerState, sample
from baton.modeling.kv.buffers import KvRows
from baton.process.clock import Clock, SteadyTime
from baton.results.prefill_trace import Interval
from baton.types import SampledToken
from prefill_workers.device_kv import kv_of
from prefill_workers.job import JobReport, KvSender
from prefill_workers.kv_pipeline import KvPipeline

_MASKS = -1
"""Value used instead of a layer's number while a job waits for its output grammar to be compiled before it samples."""
_OVERHEAD_TOKENS = 32
"""Rough fixed cost of a turn (mostly reading the weights), expressed as a number of tokens with the same compute
time."""


class ChainJob:
    """One job on one rank. The engine calls `turn` while the job is `runnable`. Once the job is `over`, the engine
    resolves `future` and forgets the job. Used by the engine's thread only, with these exceptions: `pipeline` is
    thread-safe, and any thread that holds the engine's lock may call `fail` and read the properties."""

    def __init__(self, kv_sender: KvSender, pipeline: KvPipeline, *, decoder: Decoder, clock: Clock) -> None:
        self.job = pipeline.kv.job
        self.kv_sender = kv_sender
        self.pipeline = pipeline
        self.future: Future[JobReport] = Future()
        self.error: BaseException | None = None
        """First error that made the job fail; None while it has not failed."""
        self.slowest_turn_s = 0.0
        self.parked_s = clock.now_s()
        """Time at which the last turn ended, in seconds of the clock's now_s; before the first turn, time of the job's
        creation."""
        self._own_kv, self._decoder, self._clock = pipeline.kv.own, decoder, clock
        self._kv = kv_of(pipeline, decoder.device)
        self._token_ids = self.job.token_ids[pipeline.own.start : pipeline.own.end]
        self._needs: int | None = None
        self._computed = False
        self._turns = self._run()
        self._layer_spans: list[Interval] = []
        self._wait_s = 0.0

    @property
    def expected_turn_s(self) -> float:
        """Return the number of seconds that one turn may take on this rank or an earlier one. The estimate is this
        rank's slowest turn, scaled from its own chunk to the largest of these ranks' chunks."""
        own = len(self.pipeline.own)
        largest = max([own, *(len(chunk) for chunk in self.job.chunks if chunk.end <= self.pipeline.own.start)])
        return self.slowest_turn_s * (largest + _OVERHEAD_TOKENS) / (own + _OVERHEAD_TOKENS)

    @property
    def starved(self) -> bool:
        """Return whether the job needs more KV from earlier ranks before it can run a turn or end."""
        if self._needs is not None:
            return self._needs != _MASKS and not self.pipeline.has_received(self._needs)
        return self._computed and not self.pipeline.has_received(self._decoder.config.num_layers - 1)

    @property
    def runnable(self) -> bool:
        """Return whether the engine may call `turn` now. It may not when the job is computed, over or starved, or waits
        for its output grammar."""
        masks = self.job.masks
        waits = self._needs == _MASKS and masks is not None and not masks.done()
        return not (self._computed or self.over or self.starved or waits)

    @property
    def over(self) -> bool:
        """Return whether this rank has no more work for the job, because the job failed, or its KV is computed and sent
        on."""
        return self.error is not None or (self._computed and self.pipeline.done)

    def fail(self, error: BaseException) -> None:
        """Fail the job with this error. If the job has failed already, keep its first error."""
        if self.error is None:
            self.error = error

    def turn(self) -> None:
        """Compute about one layer, up to the next point that needs more KV, or to the end. Raises the errors of the
        KvSender."""
        start_s = self._clock.now_s()
        if self._needs is not None and self._needs != _MASKS:
            self._wait_s += max(self.pipeline.arrived_s(self._needs) - self.parked_s, 0.0)
        self._needs = next(self._turns, None)
        self._computed = self._needs is None
        self.parked_s = self._clock.now_s()
        self.slowest_turn_s = max(self.slowest_turn_s, self.parked_s - start_s)

    def close(self) -> None:
        """Drop the unfinished computation, which breaks the last reference cycle that would keep its memory alive. Free
        the job's device memory."""
        self._turns.close()
        self._kv.close()

    def report(self) -> JobReport:
        """Return this rank's report on the job. Call once the job is over."""
        place = self.job.chunks.index(self.pipeline.own)
        return JobReport(
            rank=self.job.ranks[place],
            tokens=self.pipeline.own,
            start_ns=self._layer_spans[0].start_ns,
            end_ns=self._layer_spans[-1].end_ns,
            layers=tuple(self._layer_spans),
            wait_s=self._wait_s,
            num_bytes_sent=self.pipeline.num_bytes_sent,
            num_messages_sent=self.pipeline.num_sent,
            send_s=self.pipeline.send_s,
        )

    def _run(self) -> Generator[int]:
        """Compute the chunk. Before step 2 of each layer (see the module's docstring), yield the layer's number,
        because the earlier ranks' rows of that layer are needed. Yield _MASKS when sampling needs masks that are not
        ready."""
        decoder, pipeline = self._decoder, self.pipeline
        step = decoder.begin([self._kv.span])
        hidden_TD = decoder.embed(self._token_ids, step)
        last_layer, time = decoder.config.num_layers - 1, SteadyTime(self._clock)
        for layer in range(last_layer + 1):
            start_ns = time.unix_ns()
            q_TNH = decoder.project(layer, hidden_TD, step)
            own = self._kv.own_rows(layer)
            self._push(layer)
            pipeline.projected()
            if layer < last_layer:
                hidden_TD = yield from self._attend(layer, q_TNH, hidden_TD, own)
            elif pipeline.target is None:
                hidden_TD = yield from self._attend(layer, q_TNH[-1:], hidden_TD[-1:], own)
            else:
                self._kv.leave(layer)
            self._layer_spans.append(Interval(start_ns, time.unix_ns()))
        if pipeline.target is None and self.job.masks is not None and not self.job.masks.done():
            yield _MASKS
        self.kv_sender.finish(self._sample(hidden_TD) if pipeline.target is None else ())

    def _attend(self, layer: int, q_TNH: Tensor, hidden_TD: Tensor, own: KvRows) -> Generator[int, None, Tensor]:
        """Compute attention for the chunk's last len(q_TNH) tokens and complete the layer. Return these tokens' hidden
        states."""
        pipeline = self.pipeline
        attention = self._decoder.attention(layer, q_TNH, pipeline.own.end - len(q_TNH))
        attention.add(own)
        yield layer
        attention.add(*self._kv.other_rows(layer))
        if len(pipeline.earlier) and pipeline.target is None:
            self.kv_sender.received(layer, pipeline.earlier, self._own_kv.access.read([pipeline.earlier_span(layer)]))
        self._kv.leave(layer)
        return self._decoder.complete(layer, hidden_TD, attention.result())

    def _push(self, layer: int) -> None:
        job = self.job
        if self.pipeline.source is None:
            for piece, tokens in job.cached_pieces:
                if tokens.end > self.kv_sender.num_present:
                    self.kv_sender.push(layer, tokens, piece.export(layer, tokens))
        self.kv_sender.push(layer, self.pipeline.own, self._own_kv.export(layer, self.pipeline.own))

    def _sample(self, hidden_TD: Tensor) -> tuple[SampledToken, ...]:
        """Sample the next token of each choice from the last position's logits, and return these tokens."""
        job, eos_token_ids = self.job, self._decoder.config.eos_token_ids
        choices = [job.params.of_choice(choice) for choice in range(job.params.n)]
        (masks,) = (None,) if job.masks is None else job.masks.result()
        states = [
            SamplerState(params, job.prompt_ids, job.output_ids, eos_token_ids, masks=masks) for params in choices
        ]
        tokens = sample(self._decoder.logits(hidden_TD[-1:]).repeat(len(states), 1), states)
        if any(token.token_id == NO_TOKEN for token in tokens):
            raise NotFiniteError(
                f"job {job.number}: the logits behind its {len(job.token_ids)} tokens are not finite: nothing is kept; "
                "see whether this rank's model or its cached KV is damaged"
            )
        return tuple(tokens)
