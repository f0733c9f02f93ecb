"""One rank's part of a KV-Runahead chain: the forward pass over the rank's chunk of the prompt. The forward pass is
divided into turns of about one layer each.

Rank i owns the tokens [s, e) of the prompt. In each layer, it does two things:

  1. It projects the K and V of its own tokens into the job's buffer. This KV is final: it is pushed to the slot while
     the chain still runs, and the KvPipeline sends it to the next rank. The rank then computes the attention of its
     tokens to each other. This is a causal square that needs no other rank's KV. A device with its own memory begins
     the square first, and computes it while the KV is copied to host memory, from which it is pushed.
  2. It waits for the earlier ranks' KV. It then computes the dense attention of its tokens to the cached prefix and to
     the earlier ranks' KV, in place. It merges the results of steps 1 and 2 by log-sum-exp, and completes the layer.

A turn is step 2 of one layer and step 1 of the next. It ends where step 2 may have to wait. Between turns the engine
may serve other jobs. Within a turn it never waits. The dependencies are:

    rank 0   layer 0 ------> layer 1 ------> layer 2 ...         a rank needs, in layer l, only layer l of the rank
                |               |               |                before it: ranks run in step, one layer apart, and a
    rank 1      +--> layer 0 ---+--> layer 1 ---+--> layer 2     message's delay is paid once, not in every layer
                        |               |

In the last layer, only the hidden state of the last token is needed. All ranks except the last stop after projecting.
The last rank attends for one token only, completes the layer, and samples the request's next token for each choice.

No collective operation is called. Implements KV-Runahead (Cho, Rastegari, Naik, ICML 2024), section 4, with one
difference: step 1 is a causal square, where the paper computes a dense rectangle and masks its upper triangle. Called
by `prefill_workers.engine`, on its thread.
"""

from collections import deque
from collections.abc import Generator, Sequence
from concurrent.futures import Future
from typing import Protocol

from torch import Tensor

from baton.errors import NotFiniteError
from baton.modeling.forward.attention import Attention
from baton.modeling.forward.decoder import Decoder, Span
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
"""Special value in place of a layer number. It means that the job waits for its output grammar to be compiled, which
must happen before sampling."""
_OVERHEAD_TOKENS = 32
"""Approximate fixed cost of a turn (the work on about one layer), mostly for reading the weights. It is given as the
number of tokens whose computation takes the same time."""


class Batch(Protocol):
    """Jobs that are computed together (`prefill_workers.job_batch`)."""

    jobs: "list[ChainJob]"
    """Jobs whose computation continues."""

    def turn(self) -> None:
        """Compute about one layer of all jobs. Raises the errors of their KvSenders."""

    def leave(self, job: "ChainJob") -> None:
        """Remove a job that has ended. Idempotent."""


class ChainJob:
    """One job on one rank. The engine calls `turn` while the job is `runnable`. When the job is `over`, the engine
    resolves `future` and drops the job.

    Used by the engine's thread only, with two exceptions: `pipeline` is thread-safe, and any thread that holds the
    engine's lock may call `fail` and read the properties.
    """

    def __init__(self, kv_sender: KvSender, pipeline: KvPipeline, *, decoder: Decoder, clock: Clock) -> None:
        self.job = pipeline.kv.job
        self.kv_sender = kv_sender
        self.pipeline = pipeline
        self.future: Future[JobReport] = Future()
        self.error: BaseException | None = None
        """First error that made the job fail; None if the job has not failed."""
        self.batch: Batch | None = None
        """Jobs that are computed together with this one, including this one; None if it is computed alone."""
        self.slowest_turn_s = 0.0
        self.parked_s = clock.now_s()
        """Time at which the last turn (the work on about one layer) ended, as a value of the clock's `now_s`. Before
        the first turn, it is the time at which the job was created."""
        self._decoder, self._clock = decoder, clock
        self._kv = kv_of(pipeline, decoder.device)
        self._unsent = deque[int]()
        """Layers whose own KV is computed, and neither pushed nor sent yet. It may still be on its way to host
        memory."""
        self.own_ids = self.job.token_ids[pipeline.own.start : pipeline.own.end]
        """Tokens that this rank computes."""
        self._needs: int | None = None
        self._computed = False
        self._turns = self._run()
        self._layer_spans: list[Interval] = []
        self._wait_s = 0.0

    @property
    def expected_turn_s(self) -> float:
        """Return an estimate, in seconds, of the longest turn (the work on about one layer) of this job on this rank
        and the earlier ranks of the chain. The estimate is this rank's slowest turn so far, times the ratio of the
        largest chunk of these ranks to this rank's chunk. `_OVERHEAD_TOKENS` is added to both chunks."""
        own = len(self.pipeline.own)
        largest = max([own, *(len(chunk) for chunk in self.job.chunks if chunk.end <= self.pipeline.own.start)])
        return self.slowest_turn_s * (largest + _OVERHEAD_TOKENS) / (own + _OVERHEAD_TOKENS)

    @property
    def starved(self) -> bool:
        """Return True if the job waits for KV of earlier ranks, without which it can neither continue nor end."""
        if self._needs is not None:
            return self._needs != _MASKS and not self.pipeline.has_received(self._needs)
        return self._computed and not self.pipeline.has_received(self._decoder.config.num_layers - 1)

    @property
    def runnable(self) -> bool:
        """Return True if the engine may now call `turn`, which computes about one layer. Return False in three cases:
        all computations of the job are done, the job is over, or the job waits for KV of earlier ranks or for its
        output grammar."""
        masks = self.job.masks
        waits = self._needs == _MASKS and masks is not None and not masks.done()
        return not (self._computed or self.over or self.starved or waits)

    @property
    def over(self) -> bool:
        """Return True if this rank has no more work for the job: the job has failed, or its KV has been computed and
        sent to the next rank."""
        return self.error is not None or (self._computed and self.pipeline.done)

    @property
    def together(self) -> "Sequence[ChainJob]":
        """Return the jobs that `turn` computes: this job, and those of its batch."""
        return [self] if self.batch is None else self.batch.jobs

    @property
    def is_alone(self) -> bool:
        """Return True if the job's chain has only this rank."""
        return self.pipeline.source is None and self.pipeline.target is None

    @property
    def has_begun(self) -> bool:
        """Return True if the job's computation has begun."""
        return bool(self._layer_spans) or self._needs is not None

    @property
    def span(self) -> Span:
        """Return the memory into which the K and V of the rank's own tokens are written."""
        return self._kv.span

    def fail(self, error: BaseException) -> None:
        """Mark the job as failed with this error. If the job has failed before, its first error is kept."""
        if self.error is None:
            self.error = error

    def turn(self) -> None:
        """Run one turn: compute about one layer, up to the next point that needs more KV or to the end of the job. A
        turn of a batch computes this layer of all its jobs. Raises the errors of the KvSender."""
        if self.batch is not None:
            self.batch.turn()
            return
        start_s = self._clock.now_s()
        if self._needs is not None and self._needs != _MASKS:
            self._wait_s += max(self.pipeline.arrived_s(self._needs) - self.parked_s, 0.0)
        self.end_turn(start_s, next(self._turns, None))

    def end_turn(self, start_s: float, needs: int | None) -> None:
        """Record a turn that began at `start_s`. `needs`: layer whose KV of earlier ranks the next turn needs. None:
        the job is computed."""
        self._needs, self._computed = needs, needs is None
        self.parked_s = self._clock.now_s()
        self.slowest_turn_s = max(self.slowest_turn_s, self.parked_s - start_s)

    def close(self) -> None:
        """Drop the unfinished computation, and free the job's device memory. This breaks the last reference cycle that
        would keep the job's memory alive."""
        self._turns.close()
        if self.batch is not None:
            self.batch.leave(self)
        self._kv.close()

    def report(self) -> JobReport:
        """Return this rank's report on the job. Call it only when the job is over."""
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
        because the earlier ranks' KV of that layer is needed. Yield _MASKS when sampling needs masks that are not
        ready."""
        decoder, pipeline = self._decoder, self.pipeline
        step = decoder.begin([self._kv.span])
        hidden_TD = decoder.embed(self.own_ids, step)
        last_layer, time = decoder.config.num_layers - 1, SteadyTime(self._clock)
        for layer in range(last_layer + 1):
            start_ns = time.unix_ns()
            q_TNH = decoder.project(layer, hidden_TD, step)
            if layer == last_layer and pipeline.target is not None:
                self._begin_own(layer)
                self._send()
                self._kv.leave(layer)
            else:
                if layer == last_layer:
                    q_TNH, hidden_TD = q_TNH[-1:], hidden_TD[-1:]
                attention = self.attend_own(layer, q_TNH)
                yield layer
                hidden_TD = decoder.complete(layer, hidden_TD, self.attend_others(layer, attention))
            self.end_layer(layer, start_ns, time)
        if pipeline.target is None and self.job.masks is not None and not self.job.masks.done():
            yield _MASKS
        if pipeline.target is not None:
            self.kv_sender.finish(())
        else:
            states = self.sampler_states()
            self.finish(sample(decoder.logits(hidden_TD).repeat(len(states), 1), states))

    def attend_own(self, layer: int, q_TNH: Tensor) -> Attention:
        """Begin the attention of the chunk's last len(q_TNH) tokens in a projected layer: compute attention to the
        chunk's own tokens. Begin to send their KV."""
        pipeline, own = self.pipeline, self._begin_own(layer)
        attention = self._decoder.attention(layer, q_TNH, pipeline.own.end - len(q_TNH))
        attention.add(own)
        self._send(num_later=1 if self.is_alone else 0)
        return attention

    def attend_others(self, layer: int, attention: Attention) -> Tensor:
        """Compute the rest of the attention that `attend_own` has begun, and return the result. The KV of earlier ranks
        must have arrived."""
        pipeline = self.pipeline
        attention.add(*self._kv.other_rows(layer))
        if len(pipeline.earlier) and pipeline.target is None:
            earlier = pipeline.kv.bytes_of(pipeline.earlier_span(layer))
            self.kv_sender.received(layer, pipeline.earlier, earlier)
        self._kv.leave(layer)
        return attention.result()

    def end_layer(self, layer: int, start_ns: int, time: SteadyTime, share: float = 1.0) -> None:
        """Record that a layer is computed, which began at `start_ns`. After the last layer, send the KV of all layers.
        `share`: share of this job in the computation of the layer. The rest of the time counts as waiting."""
        if layer == self._decoder.config.num_layers - 1:
            self._send()
        self._layer_spans.append(took := Interval(start_ns, time.unix_ns()))
        self._wait_s += (took.end_ns - took.start_ns) / 1e9 * (1 - share)

    def sampler_states(self) -> list[SamplerState]:
        """Return the states with which the next token of each choice is sampled from the logits of the last token."""
        job, eos_token_ids = self.job, self._decoder.config.eos_token_ids
        choices = [job.params.of_choice(choice) for choice in range(job.params.n)]
        (masks,) = (None,) if job.masks is None else job.masks.result()
        return [SamplerState(params, job.prompt_ids, job.output_ids, eos_token_ids, masks=masks) for params in choices]

    def finish(self, firsts: Sequence[SampledToken]) -> None:
        """End the computation with the first token of each choice. Raises NotFiniteError for logits that are not
        finite."""
        if any(token.token_id == NO_TOKEN for token in firsts):
            raise NotFiniteError(
                f"job {self.job.number}: the logits behind its {len(self.job.token_ids)} tokens are not finite: "
                "nothing is kept; see whether this rank's model or its cached KV is damaged"
            )
        self.kv_sender.finish(tuple(firsts))

    def _begin_own(self, layer: int) -> KvRows:
        """Return the KV of the chunk's own tokens in a projected layer. If it is final in host memory, send it."""
        own = self._kv.own_rows(layer)
        self._unsent.append(layer)
        if self._decoder.device.is_home:  # before attention, which takes a while
            self._send()
        return own

    def _send(self, num_later: int = 0) -> None:
        """Push the own KV of computed layers, and send it to the next rank, except that of the last `num_later` layers.
        Waits until this KV is in host memory. A device with its own memory computes attention meanwhile. A chain of one
        rank sends a layer when the next one is queued on the device, so that the device is not idle during the wait.
        In other chains, the next rank needs each layer soon."""
        while len(self._unsent) > num_later:
            layer = self._unsent.popleft()
            self._push(layer)
            self.pipeline.projected()

    def _push(self, layer: int) -> None:
        job = self.job
        data = self._kv.own_bytes(layer)
        if self.pipeline.source is None:
            for piece, tokens in job.cached_pieces:
                if tokens.end > self.kv_sender.num_present:
                    self.kv_sender.push(layer, tokens, piece.export(layer, tokens))
        self.kv_sender.push(layer, self.pipeline.own, data)
